// test_tokenizer: tests of tokenizer.h.
//
//   cc -std=c11 -O2 -I. dev/test/test_tokenizer.c -o build/test_tokenizer -lm -pthread && build/test_tokenizer

#include "llmtrain/tokenizer.h"
#include "harness.h"

static Error error;

static void test_bytes(void) {
    char text[1000], back[1000 + 4];
    Tokenizer tokenizer = tokenizer_of_bytes();
    TokenDecoder decoder;
    Tokens tokens = {0};
    size_t length = 0, bytes;
    for (size_t i = 0; i < 1000; i++) text[i] = (char)(i < 256 ? i : random_bits(1, RANDOM_TEST, 0, i));
    expect(tokenizer_encode(&tokens, &tokenizer, text, 1000, &error) && tokens.count == 1000, "the number of tokens");
    decoder_begin(&decoder, &tokenizer);
    for (size_t i = 0; i < tokens.count; i++) {
        expect(tokens.ids[i] == (unsigned char)text[i], "a token out of range");
        const char* more = decoder_add(&bytes, &decoder, tokens.ids[i]);
        memcpy(back + length, more, bytes);
        length += bytes;
    }
    memcpy(back + length, decoder_end(&bytes, &decoder), 3);
    expect(length + bytes == 1000 && memcmp(text, back, 1000) == 0, "the text");
    tokenizer_piece(&bytes, &tokenizer, 256);
    expect(bytes == 0, "a token above the vocabulary");
    tokenizer_piece(&bytes, &tokenizer, -1);
    expect(bytes == 0, "a token below zero");
    tokens_free(&tokens);
    tokenizer_close(&tokenizer);
    verdict("bytes there and back");
}

int main(void) {
    tests_begin("test_tokenizer");
    root_enter();
    test_bytes();
    return tests_end();
}
