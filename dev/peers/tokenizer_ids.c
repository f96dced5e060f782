// tokenizer_ids: encodes many texts with tokenizer.h, for dev/peers/tokenizer_ids.py to compare.
//
//   build/tokenizer_ids PATH [PATTERN]           texts on standard input, each after its length in 4 bytes; on standard
//                                                output the tokens of each after their number, in 4 bytes each
//   build/tokenizer_ids PATH PATTERN FILE N T    speed: encodes the text of FILE N times with T threads; prints seconds
//
// PATTERN is - if the file needs none, and ^ if the tokens of each text are to begin as the tokenizer's template says.

#include "llmtrain/text/tokenizer.h"

static int complain(const Error* error) {
    fprintf(stderr, "tokenizer_ids: %s\n", error->text);
    return 1;
}

int main(int count, char** words) {
    Tokenizer tokenizer;
    Error error;
    Tokens tokens = {NULL, 0, 0, 0};
    const char* pattern = count > 2 && strchr("-^", words[2][0]) == NULL ? words[2] : NULL;
    bool begins = count > 2 && words[2][0] == '^';
    if (count < 2) return fail_with(&error, "give the path of a tokenizer"), complain(&error);
    if (!tokenizer_open(&tokenizer, words[1], pattern, &error)) return complain(&error);
    if (count == 6) {
        char* text;
        size_t bytes;
        double best = INFINITY;
        threads_set((size_t)atoi(words[5]));
        if (!file_read(words[3], (size_t)1 << 32, &text, &bytes, &error)) return complain(&error);
        for (int i = 0; i < atoi(words[4]); i++) {
            double begin = now_ms();
            tokens.count = 0;
            if (!tokenizer_encode(&tokens, &tokenizer, text, bytes, &error)) return complain(&error);
            best = fmin(best, now_ms() - begin);
        }
        printf("%.6f\n", best * 1e-3);
        free(text);
    }
    char* text = NULL;
    uint32_t bytes;
    WordEncoder encoder = tokenizer_encoder(&tokenizer);
    while (count < 6 && fread(&bytes, sizeof bytes, 1, stdin) == 1) {
        text = (char*)realloc(text, bytes + 1);
        tokens.count = 0;
        if (!text || fread(text, 1, bytes, stdin) != bytes)
            return fail_with(&error, "the input is cut"), complain(&error);
        if (begins && tokenizer.begin_of_text >= 0 && !tokens_append(&tokens, &tokenizer.begin_of_text, 1, &error))
            return complain(&error);
        if (!tokenizer_encode_by(&tokens, &tokenizer, bytes % 2 ? &encoder : NULL, text, bytes, &error))
            return complain(&error);
        uint32_t found = (uint32_t)tokens.count;
        fwrite(&found, sizeof found, 1, stdout);
        fwrite(tokens.ids, sizeof *tokens.ids, tokens.count, stdout);
    }
    word_encoder_close(&encoder);
    free(text);
    tokens_free(&tokens);
    tokenizer_close(&tokenizer);
    return 0;
}
