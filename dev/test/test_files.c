// test_files.c: everything that files.h promises.
//
//   cc -g -fsanitize=address,undefined -I. dev/test/test_files.c -o build/test_files -lm && build/test_files
//
// System calls go through the small functions below, which can make the k-th one fail, so that every error path is
// tested. The interchange with Python's safetensors is skipped, with a message, if python3 lacks it.

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "llmtrain/ops/arithmetic.h"  // includes the compiler's own headers

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <locale.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

// ------------------------------------------------------------------------------------------------
// Faults

static int fault_calls;        // calls since the count was set to zero
static int fault_at;           // the call that fails, 0 for none
static bool fault_ragged;      // reads and writes are short and interrupted
static char fault_trace[256];  // a letter per call, in order

static bool fault_now(char letter) {
    if (fault_calls < (int)sizeof fault_trace - 1) fault_trace[fault_calls] = letter;
    if (++fault_calls != fault_at) return false;
    errno = ENOSPC;
    return true;
}

static void fault_reset(int at) {
    fault_calls = 0;
    fault_at = at;
    memset(fault_trace, 0, sizeof fault_trace);
}

static ssize_t fault_transfer(ssize_t (*transfer)(int, void*, size_t, off_t), char letter, int file, void* p, size_t n,
                              off_t offset) {
    if (fault_now(letter)) return -1;
    if (fault_ragged && fault_calls % 3 == 0) {
        errno = EINTR;
        return -1;
    }
    return transfer(file, p, fault_ragged && n > 7 ? n / 2 : n, offset);
}
static ssize_t plain_write(int file, void* p, size_t n, off_t offset) {
    (void)offset;
    return write(file, p, n);
}
static ssize_t plain_read(int file, void* p, size_t n, off_t offset) { return pread(file, p, n, offset); }

#define open(path, ...) (fault_now('o') ? -1 : open(path, __VA_ARGS__))
#define write(file, p, n) fault_transfer(plain_write, 'w', file, (void*)(size_t)(p), n, 0)
#define pread(file, p, n, offset) fault_transfer(plain_read, 'p', file, p, n, offset)
#define fsync(file) (fault_now('f') ? -1 : fsync(file))
#define fstat(file, status) (fault_now('s') ? -1 : fstat(file, status))
#define rename(from, to) (fault_now('r') ? -1 : rename(from, to))
#define mkdir(path, mode) (fault_now('m') ? -1 : mkdir(path, mode))
#define rmdir(path) (fault_now('d') ? -1 : rmdir(path))
#define unlinkat(file, name, flags) (fault_now('u') ? -1 : unlinkat(file, name, flags))
#define fdopendir(file) (fault_now('O') ? NULL : fdopendir(file))
#define readdir(directory) (fault_now('R') ? NULL : readdir(directory))
#define posix_memalign(memory, boundary, bytes) (fault_now('a') ? ENOMEM : posix_memalign(memory, boundary, bytes))
#define realloc(memory, bytes) (fault_now('a') ? NULL : realloc(memory, bytes))

#include "harness.h"
#include "whole_tensors.h"

// ------------------------------------------------------------------------------------------------
// Small helpers

static Error error;  // of the last call that failed

// A condition whose failure prints the last error.
#define holds(good, what) expect(good, "%s: %.300s", what, error.text)

static void refused(bool accepted, const char* words, const char* what) {
    expect_refusal(accepted, &error, words, what);
}

static bool writes(const char* path, const char* text) { return file_write_atomic(path, text, strlen(text), &error); }

// Whether file_read returns these bytes.
static bool reads_as(const char* path, const void* data, size_t bytes) {
    char* found;
    size_t found_bytes;
    if (!file_read(path, (size_t)1 << 30, &found, &found_bytes, &error)) return false;
    bool same = found_bytes == bytes && memcmp(found, data, bytes) == 0;
    free(found);
    return same;
}

// A failed write has left the old file in place, and no temporary one.
static bool old_is_there(const char* path) { return reads_as(path, "old", 3) && directory_count(".", ".tmp-") == 0; }

static uint64_t random64(uint64_t test, uint64_t index) {
    Random4 r = random4(1, RANDOM_TEST, test, index);
    return (uint64_t)r.bits[0] << 32 | r.bits[1];
}

// ------------------------------------------------------------------------------------------------
// The harness itself: which conditions make a test fail

static const struct { int good, bad; bool bound; double error; int code; const char* says; } judged[] = {
    {0, 0, false, 0, 1, "FAILED  a test\n        nothing was expected\n"},
    {1, 0, false, 0, 0, "ok      a test\n"},
    {2, 0, false, 0, 0, " 2 conditions, 0 fail\n"},
    {0, 1, false, 0, 1, "FAILED  a test\n        one that does not hold\n"},
    {2, 1, false, 0, 1, " 3 conditions, 1 fail\n        one that does not hold\n"},
    {0, 0, true, 1, 0, "ok      a test"},
    {0, 0, true, 1.5, 1, " error 1.50e+00 exceeds 1.00e+00\n"},
    {0, 0, true, NAN, 1, "FAILED  a test"},
};

// In a child, with its own counters.
static void judge(const void* context) {
    size_t i = *(const size_t*)context;
    harness_counts = &counts_of_one_process;
    memset(&harness_now, 0, sizeof harness_now);
    for (int k = 0; k < judged[i].good + judged[i].bad; k++) expect(k >= judged[i].bad, "one that does not hold");
    if (judged[i].bound) check_bound(judged[i].error, 1, "a test");
    else verdict("a test");
    exit(tests_end());
}

static void test_harness(void) {
    for (size_t i = 0; i < COUNT_OF(judged); i++) {
        Program p;
        program_start(&p, NULL, judge, &i);
        programs_wait(&p, 1, 10e3);
        expect(!p.late && program_code(&p) == judged[i].code, "test %zu: exit code %d", i, program_code(&p));
        expect(strstr(p.text[0], judged[i].says) != NULL, "test %zu: %s", i, p.text[0]);
        program_free(&p);
    }
    verdict("the harness: no condition, one that does not hold, and a bound that is NaN fail");
}

// ------------------------------------------------------------------------------------------------
// JSON

static const char* const json_good[] = {
    "null", "true", "false", "0", "-0", "1", "-1", "10", "1234567890", "0.5", "-0.5", "1.25", "0.0", "1e5", "1E5",
    "1e+5", "1e-5", "0e0", "0e+1", "-0e-0", "1.5e300", "1.7976931348623157e308", "5e-324", "1e-400",
    "2.2250738585072011e-308", "123456789012345678901234567890", "0.000000000000000000000000000000000000000000001",
    "\"\"", "\"a\"", "\" \"", "\"\\\"\"", "\"\\\\\"", "\"\\/\"", "\"\\b\\f\\n\\r\\t\"", "\"\\u0041\"", "\"\\u00e9\"",
    "\"\\u20AC\"", "\"\\uD83D\\uDE00\"", "\"\\u0000\"", "\"\\uFFFF\"", "\"\\uFDD0\"", "\"\xC2\x80\"", "\"\xDF\xBF\"",
    "\"\xE0\xA0\x80\"", "\"\xED\x9F\xBF\"", "\"\xEE\x80\x80\"", "\"\xEF\xBF\xBF\"", "\"\xF0\x90\x80\x80\"",
    "\"\xF4\x8F\xBF\xBF\"", "\"\x7F\"", "\"/\"", "[]", "[ ]", "[1]", "[1,2]", "[ 1 , 2 ]", "[[]]", "[[],[]]",
    "[null,true,false,0,\"\",[],{}]", "{}", "{ }", "{\"a\":1}", "{\"\":1}", "{\"a\":1,\"b\":2}",
    "{\"a\":{\"a\":{\"a\":1}}}", "{\"a\":[{\"a\":1},{\"a\":1}]}", " \t\r\n1 \t\r\n", "\n{\n\"a\"\n:\n1\n}\n",
    "{\"A\":1,\"a\":2}", "{\"a\":1,\"a \":2}", "{\"a\":1,\"a\\u0000\":2}",
};

static const char* const json_bad[] = {
    "", " ", "nul", "nulll", "True", "NULL", "tru", "truefalse", "NaN", "Infinity", "-Infinity", "inf", "nan", "01",
    "-01", "00", "+1", "-", "--1", ".5", "-.5", "1.", "1.e5", "1e", "1e+", "1e5.5", "1.2.3", "0x10", "0x1p4", "1_000",
    "1,5", "1 2", "1e400", "-1e400", "1e999999999999", "\"", "\"a", "a\"", "'a'", "\"\\\"", "\"\\a\"", "\"\\v\"",
    "\"\\0\"", "\"\\x41\"", "\"\\u\"", "\"\\u1\"", "\"\\u123\"", "\"\\u123G\"", "\"\\U0041\"", "\"\\u 041\"",
    "\"\\u+041\"", "\"\\uD83D\"", "\"\\uDE00\"", "\"\\uD83D\\uD83D\"", "\"\\uDE00\\uD83D\"", "\"\\uD83D\\n\"",
    "\"\\uD83Dx\"", "\"\\uD83D\\u0041\"", "\"\n\"", "\"\t\"", "\"\x01\"", "\"\x1F\"", "\"\x80\"", "\"\xBF\"",
    "\"\xC0\x80\"", "\"\xC1\xBF\"", "\"\xC2\"", "\"\xC2\x41\"", "\"\xE0\x80\x80\"", "\"\xE0\x9F\xBF\"",
    "\"\xE2\x82\"", "\"\xED\xA0\x80\"", "\"\xED\xBF\xBF\"", "\"\xF0\x80\x80\x80\"", "\"\xF0\x8F\xBF\xBF\"",
    "\"\xF0\x9F\x98\"", "\"\xF4\x90\x80\x80\"", "\"\xF5\x80\x80\x80\"", "\"\xFF\"", "\"\xFE\"", "\357\273\2771",
    "\302\2401", "[", "]", "[1", "[1,", "[1,]", "[,1]", "[,]", "[1 2]", "[1,,2]", "[1}", "[1]]", "[][]", "[1:2]", "{",
    "}", "{]", "{\"a\"", "{\"a\":", "{\"a\":1", "{\"a\":1,", "{\"a\":1,}", "{,\"a\":1}", "{\"a\"}", "{\"a\",1}",
    "{\"a\" 1}", "{\"a\"::1}", "{a:1}", "{1:1}", "{null:1}", "{'a':1}", "{\"a\":1 \"b\":2}", "{\"a\":1,,\"b\":2}",
    "{\"a\":1]", "{\"a\":1}}", "{\"a\":1}x", "{\"a\":1,\"a\":1}", "{\"a\":1,\"b\":2,\"a\":3}",
    "{\"a\":1,\"\\u0061\":1}", "{\"\":1,\"\":2}", "[{\"a\":1,\"a\":2}]", "// x\n1", "1 // x", "/* x */ 1", "# x\n1",
    "\f1", "\v1", ",", ":", ",1", "1,", "\\u0031", "[\"a\",\n\"\\x\"]", "undefined",
};

static bool json_accepts(const char* text, size_t bytes) {
    Json json;
    bool good = json_parse(&json, text, bytes, "text", &error);
    if (good) json_free(&json);
    return good;
}

static void test_json_table(void) {
    static const struct { const char* text; size_t bytes; } zero_bytes[] = {
        {"1\0", 2}, {"\0" "1", 2}, {"\"\0\"", 3}, {"[\0]", 3}, {"{\"a\0\":1}", 8},
    };
    for (size_t i = 0; i < COUNT_OF(json_good); i++)
        expect(json_accepts(json_good[i], strlen(json_good[i])), "must be accepted: %s", json_good[i]);
    for (size_t i = 0; i < COUNT_OF(json_bad); i++)
        refused(json_accepts(json_bad[i], strlen(json_bad[i])), "text is not valid JSON: ", json_bad[i]);
    for (size_t i = 0; i < COUNT_OF(zero_bytes); i++)
        expect(!json_accepts(zero_bytes[i].text, zero_bytes[i].bytes), "zero byte in text %zu", i);
    refused(json_accepts("[1,\n 2,\n  x]", 12), "line 3, byte 3", "the message names the place");
    refused(json_accepts("[1,\n", 4), "is not valid JSON: byte 5", "the end of a line of a file is no line of its own");
    verdict("json: what is accepted and what is refused");
}

static void test_json_limits(void) {
    static const size_t large = 2000000;
    static const struct { const char* begin; char fill; const char* end; size_t bytes; bool good; } sizes[] = {
        {"", '[', "", large, false}, {"", ',', "", 4 * large, false}, {"", '9', "", large, false},
        {"0.", '9', "", large, true}, {"\"", 'x', "\"", large, true},
    };
    char* text = (char*)malloc(large * 4);
    for (size_t depth = 1; depth <= 40; depth++) {
        for (int object = 0; object <= 1; object++) {
            size_t n = 0;
            for (size_t i = 0; i < depth; i++) n += (size_t)sprintf(text + n, "%s", object ? "{\"a\":" : "[");
            text[n++] = '1';
            memset(text + n, object ? '}' : ']', depth);
            expect(json_accepts(text, n + depth) == (depth <= JSON_DEPTH_MAX), "%zu levels", depth);
        }
    }
    for (size_t i = 0; i < COUNT_OF(sizes); i++) {
        size_t end = strlen(sizes[i].end);
        memset(text, sizes[i].fill, sizes[i].bytes);
        memcpy(text, sizes[i].begin, strlen(sizes[i].begin));
        memcpy(text + sizes[i].bytes - end, sizes[i].end, end);
        expect(json_accepts(text, sizes[i].bytes) == sizes[i].good, "%zu times %c", sizes[i].bytes, sizes[i].fill);
    }
    memset(text, ',', 4 * large);
    refused(json_accepts(text, 4 * large), "too large (8000000 bytes, 8000001 values)", "the message has both sizes");

    // Commas and brackets in a string are no values; those after a string that ends in a backslash are.
    size_t long_bytes = JSON_NODES_MAX + 1000;
    char* commas = (char*)malloc(long_bytes);
    need(commas != NULL, "memory");
    memset(commas, ',', long_bytes);
    memcpy(commas, "[\"\\\"", 4);
    memcpy(commas + long_bytes - 15, "[{\",\"\\\\\",[1,2]]", 15);
    Json strings;
    if (holds(json_parse(&strings, commas, long_bytes, "text", &error), "commas in a string"))
        expect(strings.count == 6 && strings.nodes[0].count == 3, "%u values", strings.count);
    json_free(&strings);
    free(commas);

    double ms[2];
    for (int pass = 0; pass < 2; pass++) {  // names in one object: time must be linear in their number
        size_t names = pass == 0 ? 25000 : 200000, n = 0;
        for (size_t i = 0; i < names; i++) n += (size_t)sprintf(text + n, "%c\"name%zu\":%zu", i ? ',' : '{', i, i);
        text[n++] = '}';
        Json json;
        bool good = false;
        ms[pass] = INFINITY;
        for (int repeat = 0; repeat < 3; repeat++) {  // processor time, the minimum of three: others may be busy too
            if (good) json_free(&json);
            clock_t start = clock();
            good = json_parse(&json, text, n, "text", &error);
            ms[pass] = fmin(ms[pass], 1e3 * (double)(clock() - start) / CLOCKS_PER_SEC);
        }
        if (!holds(good, "an object of many names")) continue;
        uint64_t value = 0, wrong = 0;
        for (size_t i = 0; i < names; i++)
            wrong += !json_u64(&json, json_get(&json, 0, text_of("name%zu", i)), &value) || value != i;
        expect(wrong == 0 && json_get(&json, 0, "name") == JSON_NONE, "%zu names are not found", (size_t)wrong);
        json_free(&json);
    }
    // 8 times, with room for caches; quadratic would be 64
    expect(ms[1] < 40 * ms[0] + 20, "time is linear: %.1f ms for 25,000 names, %.1f ms for 200,000", ms[0], ms[1]);
    free(text);
    verdict("json: depth, size, time");
}

static void test_json_values(void) {
    static const char text[] = "{\"t\":true,\"f\":false,\"n\":null,\"s\":\"\\u00e9\\n\\ud83d\\ude00\","
                               "\"z\":\"a\\u0000b\",\"e\":\"\",\"a\":[1,[2,3],4],\"o\":{\"x\":{\"y\":7}}}";
    static const struct { const char* text; bool is_u; uint64_t u; } numbers[] = {
        {"0", true, 0}, {"18446744073709551615", true, UINT64_MAX}, {"18446744073709551616", false, 0},
        {"9223372036854775807", true, INT64_MAX}, {"9223372036854775808", true, (uint64_t)INT64_MAX + 1},
        {"-9223372036854775808", false, 0}, {"-9223372036854775809", false, 0}, {"-0", false, 0}, {"-1", false, 0},
        {"1.0", false, 0}, {"1e3", false, 0}, {"99999999999999999999", false, 0},
        {"9007199254740993", true, 9007199254740993},
    };
    Json json;
    bool b = false;
    double x = 0;
    uint64_t u = 77;
    char s[16];
    need(json_parse(&json, text, strlen(text), "text", &error), "%s", error.text);
#define MEMBER(name) json_get(&json, 0, name)
    expect(json_bool(&json, MEMBER("t"), &b) && b, "true");
    expect(json_bool(&json, MEMBER("f"), &b) && !b, "false");
    expect(!json_bool(&json, MEMBER("n"), &b), "null is no truth value");
    expect(!json_number(&json, MEMBER("t"), &x), "true is no number");
    expect(!json_u64(&json, MEMBER("s"), &u) && u == 77, "a string is no integer");
    expect(json_string(&json, MEMBER("s"), s, 8) && strcmp(s, "\xC3\xA9\n\xF0\x9F\x98\x80") == 0, "escapes: %s", s);
    expect(!json_string(&json, MEMBER("s"), s, 7), "a string that does not fit");
    expect(!json_string(&json, MEMBER("s"), s, 0), "no room at all");
    expect(!json_string(&json, MEMBER("z"), s, 16), "a string with a zero byte");
    expect(json_string(&json, MEMBER("e"), s, 1) && s[0] == 0, "the empty string");
    expect(json_u64(&json, json_get(&json, json_get(&json, MEMBER("o"), "x"), "y"), &u) && u == 7, "chain");
    uint32_t none = json_get(&json, json_get(&json, MEMBER("o"), "absent"), "y");
    expect(none == JSON_NONE && !json_u64(&json, none, &u) && !json_bool(&json, none, &b) &&
           !json_string(&json, none, s, 16) && !json_number(&json, none, &x) && json_first(&json, none) == JSON_NONE &&
           json_next(&json, none) == JSON_NONE && json_count(&json, none) == 0 && *json_key(&json, none) == 0,
           "an absent node is accepted everywhere");
    uint32_t a = MEMBER("a"), first = json_first(&json, a), second = json_next(&json, first);
    expect(json_count(&json, a) == 3 && json_count(&json, second) == 2, "elements");
    expect(json_u64(&json, json_next(&json, second), &u) && u == 4, "the element after an array");
    expect(json_next(&json, json_next(&json, second)) == JSON_NONE, "the last element");
    expect(strcmp(json_key(&json, a), "a") == 0 && strcmp(json_key(&json, first), "") == 0, "names");
#undef MEMBER
    json_free(&json);

    for (size_t i = 0; i < COUNT_OF(numbers); i++) {
        const char* number = numbers[i].text;
        if (!holds(json_parse(&json, number, strlen(number), number, &error), "a number")) continue;
        expect(json_u64(&json, 0, &u) == numbers[i].is_u && (!numbers[i].is_u || u == numbers[i].u), "%s: u64", number);
        expect(json_number(&json, 0, &x), "%s: a double", number);
        expect(strcmp(number, "-0") != 0 || (x == 0 && signbit(x)), "minus zero keeps its sign");
        json_free(&json);
    }
    verdict("json: values, members, elements");
}

static void test_json_writer(void) {
    static const size_t newlines[] = {0, 4, 12, 14};
    const char* key = "odd \"\\\n\x01\x7F\xC3\xA9";
    for (int lines = 0; lines <= 3; lines++) {
        JsonWriter w;
        memset(&w, 0, sizeof w);
        w.line_depth = lines;
        json_write_begin(&w, '{');
        json_write_key(&w, "empty");
        json_write_begin(&w, '[');
        json_write_end(&w, ']');
        json_member_string(&w, key, "\b\f\t/\xFF\xED\xA0\x80\xF0\x9F\x98\x80\xC3");
        json_write_key(&w, "list");
        json_write_begin(&w, '[');
        json_write_u64(&w, UINT64_MAX);
        json_write_bool(&w, true);
        json_write_bool(&w, false);
        json_write_number(&w, NAN);
        json_write_number(&w, -INFINITY);
        json_write_number(&w, 0.1);
        json_write_begin(&w, '{');
        json_member_number(&w, "a", -0.0);
        json_write_end(&w, '}');
        json_write_end(&w, ']');
        json_write_end(&w, '}');
        holds(json_write_done(&w, &error), "is complete");
        size_t found = 0;
        for (size_t i = 0; i < w.bytes; i++) found += w.text[i] == '\n';
        expect(found == newlines[lines], "%zu lines: %s", found, w.text);
        Json json;
        if (holds(json_parse(&json, w.text, w.bytes, "text", &error), "is read back")) {
            char s[64];
            uint64_t u = 0;
            double x = 1;
            expect(json_string(&json, json_get(&json, 0, key), s, sizeof s), "name with escapes: %s", w.text);
            expect(strcmp(s, "\b\f\t/\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD"
                             "\xF0\x9F\x98\x80\xEF\xBF\xBD") == 0, "bytes that are not UTF-8 become U+FFFD: %s", s);
            uint32_t i = json_first(&json, json_get(&json, 0, "list"));
            expect(json_u64(&json, i, &u) && u == UINT64_MAX, "u64");
            i = json_next(&json, json_next(&json, json_next(&json, i)));
            expect(json_is(&json, i, JSON_NULL) && json_is(&json, json_next(&json, i), JSON_NULL), "NaN is null");
            i = json_next(&json, json_next(&json, i));
            expect(strncmp(json.text + json.nodes[i].start, "0.1", json.nodes[i].bytes) == 0, "0.1 is short");
            i = json_get(&json, json_next(&json, i), "a");
            expect(json_number(&json, i, &x) && x == 0 && signbit(x), "minus zero");
            json_free(&json);
        }
        json_writer_free(&w);
    }
    JsonWriter open_one;
    memset(&open_one, 0, sizeof open_one);
    json_write_begin(&open_one, '[');
    expect(!json_write_done(&open_one, &error), "an open bracket is reported");
    json_writer_free(&open_one);
    verdict("json: writer");
}

// In a locale that writes 0,5 for a half: never a wrong number, never invalid JSON.
static void test_json_locale(void) {
    static const char* const names[] = {"de_DE.UTF-8", "de_DE.utf8", "fr_FR.UTF-8", "fr_FR.utf8", "de_DE", "fr_FR"};
    bool set = false;
    for (size_t i = 0; i < COUNT_OF(names) && !set; i++) set = setlocale(LC_NUMERIC, names[i]) != NULL;
    if (!set) {
        skip("json: locale with a decimal comma", "this machine has none");
        return;
    }
    Json json;
    JsonWriter w;
    memset(&w, 0, sizeof w);
    json_write_number(&w, 0.5);
    bool read = json_parse(&json, "[0.5]", 5, "text", &error);
    double value = 0.5;
    if (read) json_number(&json, 1, &value);
    setlocale(LC_NUMERIC, "C");
    expect(w.text && strcmp(w.text, "0.5") == 0, "the point is written: %s", w.text ? w.text : "");
    expect(value == 0.5, "a number is refused or right");
    json_writer_free(&w);
    if (read) json_free(&json);
    verdict("json: locale with a decimal comma");
}

// Any bits, subnormal numbers, and single precision numbers.
static double random_double(size_t i) {
    double x;
    uint64_t bits = random64(1, i) & (i % 3 == 1 ? 0x800FFFFFFFFFFFFFull : UINT64_MAX);
    memcpy(&x, &bits, sizeof x);
    return i % 3 == 2 ? (double)(float)x : x;
}

static void test_json_doubles(void) {
    const size_t count = 200000;
    JsonWriter w;
    Json json;
    memset(&w, 0, sizeof w);
    json_write_begin(&w, '[');
    for (size_t i = 0; i < count; i++) json_write_number(&w, random_double(i));
    json_write_end(&w, ']');
    bool good = json_write_done(&w, &error) && json_parse(&json, w.text, w.bytes, "doubles", &error);
    holds(good, "is read back");
    uint32_t node = good ? json_first(&json, 0) : JSON_NONE;
    for (size_t i = 0; good && i < count; i++, node = json_next(&json, node)) {
        double x = random_double(i), y = 0;
        bool same = isfinite(x) ? json_number(&json, node, &y) && memcmp(&x, &y, sizeof x) == 0
                                : json_is(&json, node, JSON_NULL);
        expect(same, "double %zu: %a, %a", i, x, y);
    }
    if (good) json_free(&json);
    json_writer_free(&w);
    verdict("json: random doubles, write and read, bits");
}

// ------------------------------------------------------------------------------------------------
// Files and directories

static void test_files(void) {
    static char long_path[10000], long_name[301];
    static const struct { const char* path; size_t limit; const char* words; } unreadable[] = {
        {"file", 2, "more than the 2"}, {"absent/file", 9, "absent/file"}, {".", 9, "not a file"},
        {"/dev/zero", 9, "not a file"},
    };
    static const struct { const char *path, *words; } unwritable[] = {
        {"absent/file", "absent/file"}, {"absent/file", "No such file or directory"}, {"file/inside", ""},
        {"directory", "name a file, not a directory"}, {"", ""}, {long_path, "too long"},
        {long_name, "File name too long"},
    };
    char* data;
    size_t bytes;
    const char* path = "file";
    int descriptors = open_descriptors();
    memset(long_path, 'x', sizeof long_path - 1);
    memset(long_name, 'x', sizeof long_name - 1);
    holds(writes(path, "old") && reads_as(path, "old", 3), "write and read");
    holds(writes(path, "") && reads_as(path, "", 0), "no bytes");
    holds(writes(path, "old") && reads_as(path, "old", 3), "replace");
    holds(file_read(path, 3, &data, &bytes, &error) && data[3] == 0, "a zero byte follows");
    free(data);
    for (size_t i = 0; i < COUNT_OF(unreadable); i++) {
        refused(file_read(unreadable[i].path, unreadable[i].limit, &data, &bytes, &error), unreadable[i].words, "read");
        expect(data == NULL, "%s: there is something to free", unreadable[i].path);
    }
    holds(directory_make("directory", &error), "make");
    for (size_t i = 0; i < COUNT_OF(unwritable); i++) {
        refused(writes(unwritable[i].path, "new"), unwritable[i].words, "write");
        holds(old_is_there(path), "the old file is there, no other");
    }
    holds(directory_remove("directory", &error), "remove");

    const char* stale = text_of("%s.tmp-%ld-0", path, (long)getpid());
    put_text(stale, "stale");  // left over by a process that was killed
    holds(writes(path, "old") && reads_as(path, "old", 3), "what is left over is no hindrance");
    holds(reads_as(stale, "stale", 5), "and is left alone");
    unlink(stale);
    expect(open_descriptors() == descriptors, "no descriptor is left open");
    verdict("files: read, replace, refuse");
}

static void test_files_ragged(void) {
    const char* path = "ragged";
    size_t bytes = 10000001;
    char* data = (char*)malloc(bytes);
    for (size_t i = 0; i < bytes; i++) data[i] = (char)(i * 7 + (i >> 13));
    fault_ragged = true;
    holds(file_write_atomic(path, data, bytes, &error), "write");
    holds(reads_as(path, data, bytes), "read");
    fault_ragged = false;
    holds(reads_as(path, data, bytes), "read again");
    free(data);
    unlink(path);
    verdict("files: short and interrupted reads and writes");
}

static void test_files_full(void) {
    const char* path = "file";
    static char data[100000];
    file_size_limit(1000);
    bool good = file_write_atomic(path, data, sizeof data, &error);
    file_size_limit(RLIM_INFINITY);
    refused(good, "File too large; raise the limit", "limit on file sizes");
    holds(old_is_there(path), "the old file is there, no other");

    FileWriter w;
    holds(file_begin(&w, path, &error), "begin");
    int full = open("/dev/full", O_WRONLY);
    if (full >= 0) {
        dup2(full, w.file);
        close(full);
        refused(file_append(&w, data, sizeof data, &error), "No space left on device; free some space", "a full disk");
        holds(!file_append(&w, data, 1, &error) && !file_end(&w, &error), "what follows fails too");
    }
    file_abort(&w);
    holds(old_is_there(path), "the old file is there, no other");
    verdict("files: full disk, limit on sizes");
}

// In a child without superuser rights, which would override permissions.
static void write_locked(const void* context) {
    if (getuid() == 0 && (setgid(65534) != 0 || setuid(65534) != 0)) exit(2);
    printf("%s", writes((const char*)context, "new") ? "written" : error.text);
}

// Closes the standard files: later files must not get their descriptors.
static void open_standard(const void* context) {
    (void)context;
    for (int file = 0; file <= 2; file++) close(file);
    files_open_standard();
    _exit(open("/dev/null", O_RDONLY));
}

// Runs a part of the test in a child, which must print the words; its exit code.
static int run_child(void (*part)(const void*), const char* context, const char* words) {
    Program p;
    program_start(&p, NULL, part, context);
    programs_wait(&p, 1, 10e3);
    expect(strstr(p.text[0], words) != NULL, "'%s' is not in: %s", words, p.text[0]);
    int code = p.late ? -1 : program_code(&p);
    program_free(&p);
    return code;
}

static void test_files_read_only(void) {
    holds(directory_make("locked", &error) && writes("locked/file", "old"), "prepare");
    chmod("locked", 0555);
    expect(run_child(write_locked, "locked/file", "Permission denied; choose a path") == 0, "a write is refused");
    expect(reads_as("locked/file", "old", 3) && directory_count("locked", "") == 1, "the old file is there, no other");
    chmod("locked", 0755);
    holds(directory_remove("locked", &error), "remove");
    verdict("files: read-only directory");
    expect(run_child(open_standard, NULL, "") > 2, "standard files that were closed");
    verdict("files: standard input, output and error");
}

static void traced(bool good, const char* calls, const char* what) {
    size_t length = strlen(fault_trace), last = strlen(calls);
    holds(good, what);
    expect(length >= last && strcmp(fault_trace + length - last, calls) == 0, "%s: %s", what, fault_trace);
    fault_reset(0);
}

// The shell must read a quoted word back unchanged.
static void test_shell_quote(void) {
    static const char* const words[] = {"a b", "it's", "''", "$(x)`y`\\\"*", "new\nline", ""};
    char quoted[64], read[64];
    for (size_t i = 0; i < COUNT_OF(words); i++) {
        shell_quote(quoted, sizeof quoted, words[i]);
        FILE* pipe = popen(text_of("printf '%%s' %s", quoted), "r");
        need(pipe != NULL, "a shell");
        read[fread(read, 1, sizeof read - 1, pipe)] = 0;
        pclose(pipe);
        check(strcmp(read, words[i]) == 0, "word %zu in quotes: a shell reads what it was", i);
    }
}

// A text that is too long ends with a whole character.
static void test_visible_end(void) {
    static const char text[] = "aaa\xe2\x82\xac\xe2\x82\xac\xe2\x82\xac\xe2\x82\xac\xe2\x82\xac";
    char visible[16];
    bool whole = true;
    for (int ascii = 0; ascii < 4; ascii++) {
        text_make_visible(visible, sizeof visible, text + ascii);
        size_t letters = strlen(visible) - (size_t)(3 - ascii);
        whole = whole && letters % 3 == 0 && letters >= 6;
    }
    check(whole, "a text is not cut in the middle of a character");
}

// For power cuts: a file is flushed before it takes its name, and the directory of the name after that.
static void test_order(void) {
    fault_reset(0);
    traced(directory_make("order", &error), "mof", "mkdir, flush of the parent");
    traced(directory_make("order/from", &error), "mof", "the same in a directory");
    traced(writes("order/from/file", "new"), "owfrof", "open, write, flush, rename, flush of the directory");
    traced(directory_rename_sync("order/from", "order/to", &error), "ofrof",
           "flush of the directory, rename, flush of the parent");
    traced(directory_remove("order/to", &error), "dof", "rmdir, flush of the parent");
    holds(directory_remove("order", &error), "remove");
    verdict("files, directories: order of writes, flushes and renames");
}

static void test_directories(void) {
    const char *deep = "a/b//c/", *file = "a/b/c/file", *c = "a/b/c", *moved = "a/b/moved";
    holds(directory_make(deep, &error) && directory_exists(c), "make with parents");
    holds(directory_make(deep, &error), "make what exists");
    holds(writes(file, "x"), "a file in it");
    refused(directory_make(file, &error), "File exists", "make over a file");
    refused(directory_make("", &error), "", "make nothing");
    holds(directory_sync(c, &error) && !directory_sync(file, &error), "flush");
    holds(directory_rename_sync(c, moved, &error) && directory_exists(moved), "rename");
    refused(directory_rename_sync(c, moved, &error), "", "rename what is absent");
    holds(directory_make(c, &error), "make");
    refused(directory_rename_sync(c, moved, &error), "move it away", "rename over a full one");
    holds(!directory_remove("a/b", &error) && directory_exists(moved), "remove one with directories");
    holds(symlink(moved, "link") == 0 && directory_exists("link") && !directory_remove("link", &error) &&
          directory_count(moved, "file") == 1, "a link is not followed");
    holds(directory_remove(c, &error) && directory_remove(moved, &error) && directory_remove("a/b", &error) &&
          directory_remove("a", &error) && !directory_exists("a"), "remove");
    holds(directory_remove("a", &error), "remove what is absent");
    unlink("link");
    verdict("directories: make, flush, rename, remove");
}

// ------------------------------------------------------------------------------------------------
// Safetensors

// Tensors of every type: no dimension, one, many, and one of size 0. The data are a pattern of the position.
static const struct Sample { const char* name; Dtype type; int dims; size_t shape[3]; } samples[] = {
    {"nothing", DTYPE_F32, 2, {0, 5, 0}}, {"f64", DTYPE_F64, 2, {3, 2, 0}},
    {"i64", DTYPE_I64, 1, {3, 0, 0}},     {"u64", DTYPE_U64, 0, {0, 0, 0}},
    {"f32", DTYPE_F32, 3, {2, 1, 3}},     {"i32", DTYPE_I32, 0, {0, 0, 0}},
    {"u32", DTYPE_U32, 1, {2, 0, 0}},     {"f16", DTYPE_F16, 1, {3, 0, 0}},
    {"bf16", DTYPE_BF16, 2, {1, 5, 0}},   {"i16", DTYPE_I16, 1, {1, 0, 0}},
    {"u16", DTYPE_U16, 0, {0, 0, 0}},     {"i8", DTYPE_I8, 1, {7, 0, 0}},
    {"middle", DTYPE_I8, 1, {0, 0, 0}},   {"u8 \xC3\xA9\"", DTYPE_U8, 1, {3, 0, 0}},
    {"bool", DTYPE_BOOL, 2, {2, 2, 0}},   {"end", DTYPE_BF16, 3, {4, 0, 4}},
};
enum { SAMPLES = COUNT_OF(samples) };

static size_t sample_bytes(const struct Sample* sample) {
    size_t bytes = dtype_bytes(sample->type);
    for (int i = 0; i < sample->dims; i++) bytes *= sample->shape[i];
    return bytes;
}

static unsigned char sample_byte(size_t sample, size_t place) {
    if (samples[sample].type == DTYPE_BOOL) return place % 2;
    return (unsigned char)(sample * 31 + place * 7);
}

static bool samples_write(const char* path, size_t piece, uint64_t* header_hash, uint64_t* hashes) {
    SafetensorsWriter w;
    unsigned char data[256];
    size_t total = 0, done = 0;
    bool good = safetensors_create(&w, path, &error) && safetensors_metadata(&w, "format", "pt", &error);
    for (size_t i = 0; good && i < SAMPLES; i++) {
        good = safetensors_declare(&w, samples[i].name, samples[i].type, samples[i].shape, samples[i].dims, &error);
        for (size_t k = 0; k < sample_bytes(&samples[i]); k++) data[total++] = sample_byte(i, k);
    }
    good = good && safetensors_begin(&w, &error);
    for (; good && done < total; done += piece)
        good = safetensors_write(&w, data + done, min_size(piece, total - done), &error);
    good = good && safetensors_end(&w, &error);
    if (good) *header_hash = w.header.hash;
    for (size_t i = 0; good && i < SAMPLES; i++) hashes[i] = w.header.tensors[i].hash;
    safetensors_writer_free(&w);
    return good;
}

// Reads everything; returns the checksum of the header and then of each tensor.
static bool samples_read(const char* path, uint64_t* hashes) {
    SafetensorsFile f;
    char data[4096];
    if (!safetensors_open(&f, path, &error)) return false;
    bool good = true;
    hashes[0] = f.header.hash;
    for (size_t i = 0; good && i < SAMPLES; i++) {
        const SafetensorsTensor* tensor = safetensors_find(&f, samples[i].name);
        if (!tensor || tensor->bytes > sizeof data)
            good = fail_with(&error, "%s is missing or too large", samples[i].name);
        good = good && safetensors_read(&f, tensor, data, tensor->bytes, &hashes[i + 1], &error);
    }
    safetensors_close(&f);
    return good;
}

static void test_safetensors_round_trip(void) {
    const char* path = "round.safetensors";
    uint64_t header_hash = 0, hashes[SAMPLES] = {0};
    SafetensorsFile f;
    for (size_t piece = 1; piece < 200; piece += piece < 20 ? 1 : 50) {
        holds(samples_write(path, piece, &header_hash, hashes), "is written");
        if (!holds(safetensors_open(&f, path, &error), "is opened")) continue;
        expect(f.header.count == SAMPLES && f.header.hash == header_hash, "the header");
        size_t file_bytes;
        char *file_data = text_read(path, &file_bytes), format[4];
        expect(file_bytes > f.data_start && hash_bytes(file_data, f.data_start) == f.header.hash,
               "the checksum is of all that stands before the data");
        free(file_data);
        uint32_t metadata = json_get(&f.header.json, 0, "__metadata__");
        expect(json_string(&f.header.json, json_get(&f.header.json, metadata, "format"), format, 4), "metadata");
        for (size_t i = 0; i < SAMPLES; i++) {
            const struct Sample* sample = &samples[i];
            const SafetensorsTensor* tensor = safetensors_find(&f, sample->name);
            bool same = tensor == &f.header.tensors[i] && tensor->type == sample->type &&
                        tensor->dims == sample->dims && tensor->bytes == sample_bytes(sample);
            for (int k = 0; same && k < tensor->dims; k++) same = tensor->shape[k] == sample->shape[k];
            if (!expect(same, "type and shape of %s", sample->name)) continue;
            unsigned char data[256], part[256];
            size_t bytes = tensor->bytes;
            uint64_t hash = 0;
            bool good = safetensors_read(&f, tensor, data, bytes, &hash, &error) && hash == hashes[i] &&
                        hash == hash_bytes(data, bytes);
            for (size_t k = 0; good && k < bytes; k++) good = data[k] == sample_byte(i, k);
            expect(good, "data and checksum of %s", sample->name);
            for (size_t first = 0; first <= bytes; first++) {
                size_t n = (bytes - first) / 2;
                good = safetensors_read_range(&f, tensor, first, n, part, &error) && memcmp(part, data + first, n) == 0;
                holds(good, "a range");
            }
            refused(safetensors_read(&f, tensor, data, bytes + 1, NULL, &error), "", "a wrong size");
            refused(safetensors_read_range(&f, tensor, bytes, 1, part, &error), "", "beyond the end");
            refused(safetensors_read_range(&f, tensor, 1, SIZE_MAX, part, &error), "requested from", "an overflow");
            refused(safetensors_read_range(&f, tensor, bytes + 1, 0, part, &error), "requested from", "a late start");
        }
        expect(safetensors_find(&f, "absent") == NULL && safetensors_find(&f, "__metadata__") == NULL, "absent");
        safetensors_close(&f);
    }
    verdict("safetensors: every type, odd shapes, pieces of any size");
}

static void test_safetensors_damage(void) {
    const char *path = "round.safetensors", *copy = "damaged.safetensors";
    uint64_t good_hashes[SAMPLES + 1], hashes[SAMPLES + 1];
    size_t bytes, by_header = 0, by_checksum = 0;
    char *data = text_read(path, &bytes), *longer = (char*)calloc(bytes + 9, 1);
    holds(samples_read(path, good_hashes), "read");
    memcpy(longer, data, bytes);
    for (size_t i = 0; i < bytes; i++) {
        for (int bit = 0; bit <= 8; bit++) {
            char flip = bit < 8 ? (char)(1 << bit) : (char)0xFF;
            data[i] ^= flip;
            memset(hashes, 0, sizeof hashes);
            put_bytes(copy, data, bytes);
            bool good = samples_read(copy, hashes), same = memcmp(hashes, good_hashes, sizeof hashes) == 0;
            by_header += !good;
            by_checksum += good && !same;
            expect(!good || !same, "bit %d of byte %zu: the change is not seen", bit, i);
            data[i] ^= flip;
        }
    }
    printf("  %zu flips of a file of %zu bytes: %zu refused, %zu told by a checksum\n", 9 * bytes, bytes, by_header,
           by_checksum);
    for (size_t size = 0; size <= bytes + 9; size++) {
        put_bytes(copy, longer, size);
        if (size != bytes) refused(samples_read(copy, hashes), copy, "a file that is cut or longer");
    }
    SafetensorsFile f;
    put_bytes(copy, data, bytes);
    holds(safetensors_open(&f, copy, &error) && truncate(copy, (off_t)bytes - 1) == 0, "cut while it is open");
    const SafetensorsTensor* last = &f.header.tensors[f.header.count - 2];
    refused(safetensors_read(&f, last, longer, last->bytes, NULL, &error), "1 bytes early", "cut while it is open");
    safetensors_close(&f);
    free(longer);
    free(data);
    unlink(copy);
    verdict("safetensors: flipped bytes, cut files");
}

// A file: a header length in its first 8 bytes, this header, and this many bytes of data.
static bool header_opens(uint64_t length, char* header, size_t data_bytes) {
    static const char path[] = "header.safetensors";
    SafetensorsFile f;
    size_t bytes = strlen(header);
    char* file = (char*)malloc(8 + bytes + data_bytes);
    memcpy(file, &length, 8);
    memcpy(file + 8, header, bytes);
    memset(file + 8 + bytes, 'x', data_bytes);
    put_bytes(path, file, 8 + bytes + data_bytes);
    free(file);
    bool opened = safetensors_open(&f, path, &error);
    if (opened) safetensors_close(&f);
    unlink(path);
    return opened;
}

static void test_safetensors_headers(void) {
#define TENSOR(name, dtype, shape, offsets) \
    "'" name "':{'dtype':'" dtype "','shape':[" shape "],'data_offsets':[" offsets "]}"
#define A TENSOR("a", "F32", "2", "0,8")
#define ONE(shape, offsets) "{" TENSOR("a", "F32", shape, offsets) "}"
#define BYTES(name, shape, offsets) TENSOR(name, "U8", shape, offsets)
    // Each is followed by 8 bytes of data; ' stands for the quotation mark.
    static const char* const good[] = {
        ONE("2", "0,8"), "{" TENSOR("b", "F32", "", "4,8") ",'a':{'shape':[1],'data_offsets':[0,4],'dtype':'I32'}}",
        "{'__metadata__':{}," BYTES("a", "2,2,2", "0,8") "}      ",
        "{" BYTES("a", "8", "0,8") "," BYTES("b", "0", "8,8") "}",
        "{" BYTES("a", "8", "0,8") "," BYTES("b", "0", "0,0") "}", "{" BYTES("a", "1,1,1,1,1,1,1,8", "0,8") "}",
    };
    static const char* const bad[] = {
        "", "{}", "[]", "1", " " ONE("2", "0,8"), ONE("2", "0,8") "x", "{'a':1}", "{'a':{}}", "{'a':[1,2,3]}",
        "{'__metadata__':{'x':1}," A "}", "{'__metadata__':[]," A "}", "{" TENSOR("a", "F33", "2", "0,8") "}",
        "{'a':{'dtype':1,'shape':[2],'data_offsets':[0,8]}}", "{" TENSOR("a", "F32F32F32F32", "2", "0,8") "}",
        "{'a':{'dtype':'F32','shape':2,'data_offsets':[0,8]}}", ONE("2.0", "0,8"), ONE("-2", "0,8"), ONE("3", "0,8"),
        ONE("'2'", "0,8"), "{'a':{'dtype':'F32','shape':[2],'data_offsets':[0,8],'x':1}}",
        "{'a':{'dtype':'F32','shape':[2]}}", ONE("2", "0"), ONE("2", "0,8,8"), ONE("2", "8,0"), ONE("2", "8,16"),
        ONE("1", "0,4"), ONE("1", "4,8"), ONE("4", "0,16"), ONE("2", "0,3"),
        "{" BYTES("a", "4294967296,4294967296", "0,0") "," TENSOR("b", "F64", "", "0,8") "}",
        "{" TENSOR("a", "F64", "2305843009213693953", "0,8") "}",
        "{" BYTES("a", "18446744073709551615", "0,18446744073709551615") "}",
        "{" BYTES("a", "6", "0,6") "," BYTES("b", "4", "4,8") "}",
        "{" BYTES("a", "8", "0,8") "," BYTES("b", "8", "0,8") "}",
        "{" BYTES("a", "3", "0,3") "," BYTES("b", "4", "4,8") "}",
        "{" BYTES("a", "8", "0,8") "," BYTES("b", "0", "4,4") "}", "{" A "," A "}",
        "{" TENSOR("", "F32", "2", "0,8") "}", "{" TENSOR("a\\u0000", "F32", "2", "0,8") "}",
        "{" TENSOR("a\\n", "F32", "2", "0,8") "}", "{" BYTES("a", "1,1,1,1,1,1,1,1,8", "0,8") "}",
    };
    static const uint64_t lengths[] = {0, 1, 63, 1000, 100000001, UINT64_MAX, UINT64_MAX - 7, (uint64_t)1 << 63};
    for (size_t i = 0; i < COUNT_OF(good) + COUNT_OF(bad); i++) {
        bool is_good = i < COUNT_OF(good);
        char header[512];
        snprintf(header, sizeof header, "%s", is_good ? good[i] : bad[i - COUNT_OF(good)]);
        for (char* c = header; *c; c++) *c = *c == '\'' ? '"' : *c;
        bool opened = header_opens(strlen(header), header, 8);
        expect(opened == is_good, "must be %s: %s", is_good ? "accepted" : "refused", header);
    }
    for (size_t i = 0; i < COUNT_OF(lengths); i++) refused(header_opens(lengths[i], "", 56), "", "a wrong length");
    char fp8[] = "{\"a\":{\"dtype\":\"F8_E4M3\",\"shape\":[8],\"data_offsets\":[0,8]}}";
    refused(header_opens(strlen(fp8), fp8, 8), "give F32, F16 or BF16", "a type that is not read here");
    char* text = (char*)malloc(20000000);  // many tensors, many bytes: refused for the number, not for memory
    size_t n = 0;
    for (int i = 0; i < 70000; i++)
        n += (size_t)sprintf(text + n, "%c\"%d\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}",
                             i ? ',' : '{', i);
    n += (size_t)sprintf(text + n, "}");
    refused(header_opens(n, text, 0), "too many tensors", "too many tensors");
    free(text);
    verdict("safetensors: headers accepted and refused");
}

static void test_safetensors_alignment(void) {
    const char* path = "alignment.safetensors";
    for (size_t length = 1; length <= SAFETENSORS_NAME_MAX; length++) {
        char name[SAFETENSORS_NAME_MAX + 1] = {0};
        memset(name, 'n', length);
        SafetensorsWriter w;
        bool good = safetensors_create(&w, path, &error) &&
                    safetensors_declare(&w, name, DTYPE_BF16, NULL, 0, &error) && safetensors_begin(&w, &error) &&
                    safetensors_write(&w, "xy", 2, &error) && safetensors_end(&w, &error);
        safetensors_writer_free(&w);
        holds(good == (length < SAFETENSORS_NAME_MAX), "a name of each length, up to the limit");
        SafetensorsFile f;
        if (!good || !safetensors_open(&f, path, &error)) continue;
        expect(f.data_start % 8 == 0 && safetensors_find(&f, name) != NULL, "the data begin at a multiple of 8");
        safetensors_close(&f);
    }
    unlink(path);
    verdict("safetensors: length of names, alignment");
}

// A caller's actions, one letter each: metadata; declarations; begin, writes of 8, 7 and 1 bytes; end.
static bool misuse(SafetensorsWriter* w, char letter) {
    static char long_name[400];
    static const size_t two = 2, huge[2] = {(size_t)1 << 40, (size_t)1 << 40};
    memset(long_name, 'n', sizeof long_name - 1);
    switch (letter) {
        case 'm': return safetensors_metadata(w, "a", "b", &error);
        case 'a': return safetensors_declare(w, "a", DTYPE_F32, &two, 1, &error);
        case '0': return safetensors_declare(w, "", DTYPE_F32, &two, 1, &error);
        case 'l': return safetensors_declare(w, long_name, DTYPE_F32, &two, 1, &error);
        case '_': return safetensors_declare(w, "__metadata__", DTYPE_F32, &two, 1, &error);
        case 'n': return safetensors_declare(w, "a\n", DTYPE_F32, &two, 1, &error);
        case 'h': return safetensors_declare(w, "a", DTYPE_F32, huge, 2, &error);
        case '9': return safetensors_declare(w, "b", DTYPE_F32, &two, 9, &error);
        case '-': return safetensors_declare(w, "b", DTYPE_F32, &two, -1, &error);
        case 'B': return safetensors_begin(w, &error);
        case 'E': return safetensors_end(w, &error);
        default: return safetensors_write(w, "12345678", letter == 'W' ? 8 : letter == 'S' ? 7 : 1, &error);
    }
}

static void test_safetensors_misuse(void) {
    static const char* const callers[] = {"0BWE", "lBWE", "_BWE", "nBWE", "hBWE", "aaBWE", "a9BWE", "amBWE", "aWE",
                                          "mmaBWE", "aBSE", "aBE", "aBWwE", "a-BWE"};
    const char* path = "misuse.safetensors";
    SafetensorsWriter w;
    SafetensorsFile f;
    for (size_t i = 0; i < COUNT_OF(callers); i++) {
        bool good = writes(path, "old") && safetensors_create(&w, path, &error);
        if (!holds(good, "begin")) continue;
        error.text[0] = 0;
        for (const char* letter = callers[i]; good && *letter; letter++) good = misuse(&w, *letter);
        expect(!good && error.text[0], "%s: a mistake is not told", callers[i]);
        safetensors_writer_free(&w);
        holds(old_is_there(path), "the old file is there, no other");
    }
    holds(safetensors_create(&w, path, &error) && safetensors_begin(&w, &error) && safetensors_end(&w, &error),
          "a file without tensors");
    safetensors_writer_free(&w);
    if (holds(safetensors_open(&f, path, &error) && f.header.count == 0, "is read")) safetensors_close(&f);
    unlink(path);
    verdict("safetensors: mistakes of the caller");
}

// ------------------------------------------------------------------------------------------------
// Every system call fails once

static bool operation_write(void) { return writes("fault", "new"); }
static bool operation_read(void) { return reads_as("file", "old", 3); }
static bool operation_directories(void) {
    return directory_make("x/y", &error) && writes("x/y/file", "new") && directory_rename_sync("x/y", "x/z", &error) &&
           directory_remove("x/z", &error) && directory_remove("x", &error);
}
static bool operation_samples_write(void) {
    uint64_t header_hash, hashes[SAMPLES];
    return samples_write("fault", 37, &header_hash, hashes);
}
static bool operation_samples_read(void) {
    uint64_t hashes[SAMPLES + 1];
    return samples_read("round.safetensors", hashes);
}
static bool operation_json_write(void) {
    JsonWriter w;
    memset(&w, 0, sizeof w);
    json_write_begin(&w, '[');
    for (int i = 0; i < 1000; i++) json_write_number(&w, i / 7.0);
    json_write_end(&w, ']');
    bool good = json_write_done(&w, &error);
    json_writer_free(&w);
    return good;
}

static void test_faults(void) {
    static const struct { bool (*run)(void); const char* name; int least; } operations[] = {  // calls that can fail
        {operation_write, "file_write_atomic", 4}, {operation_read, "file_read", 4},
        {operation_directories, "directories", 20}, {operation_samples_write, "safetensors, written", 13},
        {operation_samples_read, "safetensors, read", 4}, {operation_json_write, "json, written", 5},
    };
    const char* path = "fault";
    uint64_t hashes[SAMPLES + 1];
    for (size_t i = 0; i < COUNT_OF(operations); i++) {
        const char* name = operations[i].name;
        bool good = false;
        int points = 0;
        for (;; points++) {
            writes(path, "old");
            int descriptors = open_descriptors();
            error.text[0] = 0;
            fault_reset(points + 1);
            good = operations[i].run();
            fault_at = 0;  // fault_calls keeps its count
            if (good || fault_calls <= points) break;
            expect(strlen(error.text) > 20, "%s: the failure is told", name);
            expect(open_descriptors() == descriptors, "%s: no descriptor is left open", name);
            expect(directory_count(".", ".tmp-") == 0, "%s: no temporary file is left", name);
            bool whole = i == 3 ? samples_read(path, hashes) : reads_as(path, "new", 3);
            expect(whole || reads_as(path, "old", 3), "%s: the old file is there, or the new one, whole", name);
            if (operations[i].run != operation_directories) continue;
            unlink("x/y/file");
            holds(directory_remove("x/y", &error) && directory_remove("x/z", &error) && directory_remove("x", &error),
                  "what is left can be removed");
        }
        expect(good && fault_calls <= points, "%s: without a fault it succeeds, with one it fails", name);
        expect(points >= operations[i].least, "%s: %d points of failure", name, points);
    }
    unlink(path);
    verdict("faults: every system call and allocation fails in turn");
}

// ------------------------------------------------------------------------------------------------
// Interchange with Python

static const char python_check[] =
    "import sys, struct, numpy as np, safetensors\n"
    "from safetensors.numpy import load_file, save_file\n"
    "ours, theirs = sys.argv[1:]\n"
    "data = open(ours, 'rb').read()\n"
    "assert struct.unpack('<Q', data[:8])[0] % 8 == 0\n"
    "expected = [line.split('\\t') for line in sys.stdin.read().split('\\n') if line]\n"
    "found = {name: t for name, t in safetensors.deserialize(data)}\n"
    "assert len(found) == len(expected), (len(found), len(expected))\n"
    "for name, dtype, shape, content in expected:\n"
    "    t = found[name]\n"
    "    assert t['dtype'] == dtype and ','.join(map(str, t['shape'])) == shape, (name, t['dtype'], t['shape'])\n"
    "    assert bytes(t['data']).hex() == content, name\n"
    "with safetensors.safe_open(ours, 'np') as f:\n"
    "    assert f.metadata() == {'format': 'pt'}\n"
    "    assert f.get_tensor('f64').shape == (3, 2) and f.get_tensor('f64').dtype == np.float64\n"
    "save_file({'a': np.arange(6, dtype=np.float32).reshape(2, 3), 'b': np.array(7, dtype=np.int64),\n"
    "           'c': np.zeros((0, 4), np.float16), 'd': np.array([True, False, True])}, theirs, metadata={'who': "
    "'them'})\n";

static void test_python(void) {
    const char *ours = "round.safetensors", *theirs = "theirs.safetensors", *script = "check.py";
    if (system("python3 -c 'import safetensors, numpy' >/dev/null 2>&1") != 0) {
        skip("safetensors: interchange with Python", "there is no python3 with safetensors and numpy");
        return;
    }
    put_text(script, python_check);
    FILE* pipe = popen(text_of("python3 '%s' '%s' '%s'", script, ours, theirs), "w");
    need(pipe != NULL, "python3 starts");
    for (size_t i = 0; i < SAMPLES; i++) {
        fprintf(pipe, "%s\t%s\t", samples[i].name, DTYPES[samples[i].type].safetensors);
        for (int k = 0; k < samples[i].dims; k++) fprintf(pipe, "%s%zu", k ? "," : "", samples[i].shape[k]);
        fprintf(pipe, "\t");
        for (size_t k = 0; k < sample_bytes(&samples[i]); k++) fprintf(pipe, "%02x", sample_byte(i, k));
        fprintf(pipe, "\n");
    }
    expect(pclose(pipe) == 0, "Python reads what we write: see its message above");

    static const float floats[6] = {0, 1, 2, 3, 4, 5};
    static const int64_t integer = 7;
    static const unsigned char truths[3] = {1, 0, 1};
    const struct { struct Sample is; const void* data; } expected[] = {
        {{"a", DTYPE_F32, 2, {2, 3}}, floats}, {{"b", DTYPE_I64, 0, {0}}, &integer}, {{"c", DTYPE_F16, 2, {0, 4}}, ""},
        {{"d", DTYPE_BOOL, 1, {3}}, truths},
    };
    SafetensorsFile f;
    if (holds(safetensors_open(&f, theirs, &error), "we read what Python writes")) {
        for (size_t i = 0; i < COUNT_OF(expected); i++) {
            const struct Sample* is = &expected[i].is;
            const SafetensorsTensor* t = safetensors_find(&f, is->name);
            char data[64];
            bool same = t && t->type == is->type && t->dims == is->dims && t->bytes == sample_bytes(is) &&
                        memcmp(t->shape, is->shape, (size_t)is->dims * sizeof *is->shape) == 0;
            same = same && safetensors_read(&f, t, data, t->bytes, NULL, &error);
            expect(same && memcmp(data, expected[i].data, t->bytes) == 0, "tensor %s", is->name);
        }
        safetensors_close(&f);
    }
    verdict("safetensors: interchange with Python");
}

int main(void) {
    tests_begin("test_files");
    root_enter();
    test_harness();
    test_json_table();
    test_json_limits();
    test_json_values();
    test_json_writer();
    test_json_doubles();
    test_json_locale();
    test_files();
    test_files_ragged();
    test_files_full();
    test_files_read_only();
    test_shell_quote();
    test_visible_end();
    test_order();
    test_directories();
    test_safetensors_round_trip();
    test_safetensors_damage();
    test_safetensors_headers();
    test_safetensors_alignment();
    test_safetensors_misuse();
    test_faults();
    test_python();
    return tests_end();
}
