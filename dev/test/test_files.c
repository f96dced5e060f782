// test_files.c: everything that files.h promises.
//
//   cc -g -fsanitize=address,undefined -I. dev/test/test_files.c -o build/test_files -lm && build/test_files
//
// The calls into the system go through the small functions below, which can make the k-th one fail, so that every error
// path is walked. One line per family of checks. The interchange with Python's safetensors is skipped, saying so, where
// python3 lacks it.

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

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
static bool fault_ragged;      // reads and writes are short, and are interrupted
static char fault_trace[256];  // a letter for each call, in their order

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

#include "llmtrain/safetensors.h"
#include "harness.h"

// ------------------------------------------------------------------------------------------------
// Small helpers

static void holds(bool good, const char* what, const char* detail) { expect(good, "%s: %.300s", what, detail); }

static bool put(const char* path, const void* data, size_t bytes) {
    put_bytes(path, data, bytes);
    return true;
}

// As file_read reads it.
static bool reads_as(const char* path, const void* data, size_t bytes) {
    Error error;
    char* found;
    size_t found_bytes;
    if (!file_read(path, (size_t)1 << 30, &found, &found_bytes, &error)) return false;
    bool same = found_bytes == bytes && memcmp(found, data, bytes) == 0;
    free(found);
    return same;
}

static uint64_t random64(uint64_t test, uint64_t index) {
    Random4 r = random4(1, RANDOM_TEST, test, index);
    return (uint64_t)r.bits[0] << 32 | r.bits[1];
}

// ------------------------------------------------------------------------------------------------
// The harness itself: what makes a test fail

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

// In a child, with sums of its own.
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

static void test_json_table(void) {
    Error error;
    Json json;
    for (size_t i = 0; i < sizeof json_good / sizeof *json_good; i++) {
        bool good = json_parse(&json, json_good[i], strlen(json_good[i]), "text", &error);
        holds(good, "must be accepted", json_good[i]);
        if (good) json_free(&json);
    }
    for (size_t i = 0; i < sizeof json_bad / sizeof *json_bad; i++) {
        bool good = json_parse(&json, json_bad[i], strlen(json_bad[i]), "text", &error);
        holds(!good && strncmp(error.text, "text is not valid JSON: line ", 29) == 0, "must be refused", json_bad[i]);
        if (good) json_free(&json);
    }
    static const char* const zero[] = {"1\0",
                                       ("\0"
                                        "1"),
                                       "\"\0\"", "[\0]", "{\"a\0\":1}"};
    static const size_t zero_bytes[] = {2, 2, 3, 3, 8};
    for (size_t i = 0; i < 5; i++) holds(!json_parse(&json, zero[i], zero_bytes[i], "text", &error), "zero byte", "");
    holds(!json_parse(&json, "[1,\n 2,\n  x]", 12, "text", &error), "refused", "");
    holds(strstr(error.text, "line 3, byte 3") != NULL, "the message names the place", error.text);
    verdict("json: what is accepted and what is refused");
}

static bool json_accepts(const char* text, size_t bytes) {
    Error error;
    Json json;
    bool good = json_parse(&json, text, bytes, "text", &error);
    if (good) json_free(&json);
    return good;
}

static void test_json_limits(void) {
    size_t large = 2000000;
    char* text = (char*)malloc(large * 4);
    for (int depth = 1; depth <= 40; depth++) {
        memset(text, '[', (size_t)depth);
        memset(text + depth, ']', (size_t)depth);
        holds(json_accepts(text, 2 * (size_t)depth) == (depth <= JSON_DEPTH_MAX), "depth of arrays", "32 levels");
        size_t n = 0;
        for (int i = 0; i < depth; i++) {
            memcpy(text + n, "{\"a\":", 5);
            n += 5;
        }
        text[n++] = '1';
        memset(text + n, '}', (size_t)depth);
        holds(json_accepts(text, n + (size_t)depth) == (depth <= JSON_DEPTH_MAX), "depth of objects", "32 levels");
    }
    memset(text, '[', large);
    holds(!json_accepts(text, large), "two million brackets", "");
    memset(text, ',', large * 4);
    holds(!json_accepts(text, large * 4), "eight million commas", "");
    memset(text, '9', large);
    holds(!json_accepts(text, large), "a number of two million digits", "");
    memcpy(text, "0.", 2);
    holds(json_accepts(text, large), "a fraction of two million digits", "");
    memset(text, 'x', large);
    text[0] = text[large - 1] = '"';
    holds(json_accepts(text, large), "a string of two million bytes", "");

    double ms[2];
    for (int pass = 0; pass < 2; pass++) {  // names in one object: time must grow as the number of names
        size_t names = pass == 0 ? 25000 : 200000, n = 0;
        text[n++] = '{';
        for (size_t i = 0; i < names; i++) n += (size_t)sprintf(text + n, "%s\"name%zu\":%zu", i ? "," : "", i, i);
        text[n++] = '}';
        Error error;
        Json json;
        bool good = false;
        ms[pass] = INFINITY;
        for (int repeat = 0; repeat < 3; repeat++) {  // processor time, the least of three: others may be busy too
            if (good) json_free(&json);
            clock_t start = clock();
            good = json_parse(&json, text, n, "text", &error);
            ms[pass] = fmin(ms[pass], 1e3 * (double)(clock() - start) / CLOCKS_PER_SEC);
        }
        holds(good, "an object of many names", good ? "" : error.text);
        uint64_t value = 0, wrong = 0;
        char name[32];
        for (size_t i = 0; good && i < names; i++) {
            snprintf(name, sizeof name, "name%zu", i);
            wrong += !json_u64(&json, json_get(&json, 0, name), &value) || value != i;
        }
        holds(good && wrong == 0 && json_get(&json, 0, "name") == JSON_NONE, "each is found", "");
        if (good) json_free(&json);
    }
    char detail[100];
    snprintf(detail, sizeof detail, "%.1f ms for 25,000 names, %.1f ms for 200,000", ms[0], ms[1]);
    holds(ms[1] < 40 * ms[0] + 20, "time is linear (8, with room for caches; quadratic is 64)", detail);
    free(text);
    verdict("json: depth, size, time");
}

static void test_json_values(void) {
    Error error;
    Json json;
    static const char text[] =
        "{\"t\":true,\"f\":false,\"n\":null,\"s\":\"\\u00e9\\n\\ud83d\\ude00\",\"z\":\"a\\u0000b\",\"e\":\"\",\"a\":[1,"
        "[2,3],4],"
        "\"o\":{\"x\":{\"y\":7}},\"i\":[0,18446744073709551615,18446744073709551616,9223372036854775807,"
        "9223372036854775808,"
        "-9223372036854775808,-9223372036854775809,-0,-1,1.0,1e3,99999999999999999999,9007199254740993]}";
    bool good = json_parse(&json, text, strlen(text), "text", &error);
    holds(good, "is read", error.text);
    if (!good) {
        verdict("json: values");
        return;
    }
    bool b = false;
    double x = 0;
    uint64_t u = 77;
    char s[16];
    holds(json_bool(&json, json_get(&json, 0, "t"), &b) && b, "true", "");
    holds(json_bool(&json, json_get(&json, 0, "f"), &b) && !b, "false", "");
    holds(!json_bool(&json, json_get(&json, 0, "n"), &b), "null is no truth value", "");
    holds(!json_number(&json, json_get(&json, 0, "t"), &x), "true is no number", "");
    holds(!json_u64(&json, json_get(&json, 0, "s"), &u) && u == 77, "a string is no integer", "");
    holds(json_string(&json, json_get(&json, 0, "s"), s, 8) && strcmp(s, "\xC3\xA9\n\xF0\x9F\x98\x80") == 0, "escapes",
          s);
    holds(!json_string(&json, json_get(&json, 0, "s"), s, 7), "a string that does not fit", "");
    holds(!json_string(&json, json_get(&json, 0, "s"), s, 0), "no room at all", "");
    holds(!json_string(&json, json_get(&json, 0, "z"), s, 16), "a string with a zero byte", "");
    holds(json_string(&json, json_get(&json, 0, "e"), s, 1) && s[0] == 0, "the empty string", "");
    holds(json_u64(&json, json_get(&json, json_get(&json, json_get(&json, 0, "o"), "x"), "y"), &u) && u == 7, "chain",
          "");
    uint32_t none = json_get(&json, json_get(&json, json_get(&json, 0, "o"), "absent"), "y");
    holds(none == JSON_NONE && !json_u64(&json, none, &u) &&
          !json_bool(&json, none, &b) && !json_string(&json, none, s, 16) && !json_number(&json, none, &x) &&
          json_first(&json, none) == JSON_NONE && json_next(&json, none) == JSON_NONE && json_count(&json, none) == 0 &&
          *json_key(&json, none) == 0, "an absent node is accepted everywhere", "");
    uint32_t a = json_get(&json, 0, "a"), first = json_first(&json, a), second = json_next(&json, first);
    holds(json_count(&json, a) == 3 && json_count(&json, second) == 2, "elements", "");
    holds(json_u64(&json, json_next(&json, second), &u) && u == 4, "the element after an array", "");
    holds(json_next(&json, json_next(&json, second)) == JSON_NONE, "the last element", "");
    holds(strcmp(json_key(&json, a), "a") == 0 && strcmp(json_key(&json, first), "") == 0, "names", "");

    static const bool is_u[] = {1, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1};
    static const uint64_t us[] = {0, UINT64_MAX, 0, INT64_MAX, (uint64_t)INT64_MAX + 1, 0, 0, 0,
                                  0, 0,          0, 0,         9007199254740993};
    int k = 0;
    for (uint32_t i = json_first(&json, json_get(&json, 0, "i")); i != JSON_NONE; i = json_next(&json, i), k++) {
        char detail[32];
        snprintf(detail, sizeof detail, "number %d", k);
        holds(json_u64(&json, i, &u) == is_u[k] && (!is_u[k] || u == us[k]), "unsigned integer", detail);
        holds(json_number(&json, i, &x), "number", detail);
        if (k == 7) holds(x == 0 && signbit(x), "minus zero keeps its sign", detail);
    }
    holds(k == 13, "all of them", "");
    json_free(&json);
    verdict("json: values, members, elements");
}

static void test_json_writer(void) {
    Error error;
    for (int lines = 0; lines <= 3; lines++) {
        JsonWriter w;
        memset(&w, 0, sizeof w);
        w.line_depth = lines;
        json_write_begin(&w, '{');
        json_write_key(&w, "empty");
        json_write_begin(&w, '[');
        json_write_end(&w, ']');
        json_write_key(&w, "odd \"\\\n\x01\x7F\xC3\xA9");
        json_write_string(&w, "\b\f\t/\xFF\xED\xA0\x80\xF0\x9F\x98\x80\xC3");
        json_write_key(&w, "list");
        json_write_begin(&w, '[');
        json_write_u64(&w, UINT64_MAX);
        json_write_bool(&w, true);
        json_write_bool(&w, false);
        json_write_number(&w, NAN);
        json_write_number(&w, -INFINITY);
        json_write_number(&w, 0.1);
        json_write_begin(&w, '{');
        json_write_key(&w, "a");
        json_write_number(&w, -0.0);
        json_write_end(&w, '}');
        json_write_end(&w, ']');
        json_write_end(&w, '}');
        holds(json_write_done(&w, &error), "is complete", "");
        Json json;
        bool good = json_parse(&json, w.text, w.bytes, "text", &error);
        holds(good, "is read back", error.text);
        if (good) {
            char s[64];
            uint64_t u = 0;
            double x = 1;
            uint32_t i = json_first(&json, json_get(&json, 0, "list"));
            uint32_t odd = json_get(&json, 0, "odd \"\\\n\x01\x7F\xC3\xA9");
            holds(json_string(&json, odd, s, sizeof s), "name with escapes", w.text);
            holds(strcmp(s, "\b\f\t/\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\xF0\x9F\x98\x80\xEF\xBF\xBD") == 0,
                  "bytes that are not UTF-8 become U+FFFD", w.text);
            holds(json_u64(&json, i, &u) && u == UINT64_MAX, "u64", "");
            i = json_next(&json, json_next(&json, json_next(&json, i)));
            holds(json_is(&json, i, JSON_NULL) && json_is(&json, json_next(&json, i), JSON_NULL), "NaN is null", "");
            i = json_next(&json, json_next(&json, i));
            holds(strncmp(json.text + json.nodes[i].start, "0.1", json.nodes[i].bytes) == 0, "0.1 is short", w.text);
            i = json_get(&json, json_next(&json, i), "a");
            holds(json_number(&json, i, &x) && x == 0 && signbit(x), "minus zero", "");
            json_free(&json);
        }
        size_t found = 0;
        for (size_t i = 0; i < w.bytes; i++) found += w.text[i] == '\n';
        holds(found == (size_t)(lines == 0 ? 0 : lines == 1 ? 4 : lines == 2 ? 12 : 14), "lines", w.text);
        json_writer_free(&w);
    }
    JsonWriter open_one;
    memset(&open_one, 0, sizeof open_one);
    json_write_begin(&open_one, '[');
    holds(!json_write_done(&open_one, &error), "an open bracket is reported", "");
    json_writer_free(&open_one);
    verdict("json: writer");
}

// In a country that writes 0,5 for a half: never a wrong number, never a text that is not JSON.
static void test_json_locale(void) {
    static const char* const names[] = {"de_DE.UTF-8", "de_DE.utf8", "fr_FR.UTF-8", "fr_FR.utf8", "de_DE", "fr_FR"};
    bool set = false;
    for (size_t i = 0; i < sizeof names / sizeof *names && !set; i++) set = setlocale(LC_NUMERIC, names[i]) != NULL;
    if (!set) {
        skip("json: locale with a decimal comma", "this machine has none");
        return;
    }
    Error error;
    Json json;
    JsonWriter w;
    memset(&w, 0, sizeof w);
    json_write_number(&w, 0.5);
    bool read = json_parse(&json, "[0.5]", 5, "text", &error);
    double value = 0.5;
    if (read) json_number(&json, 1, &value);
    setlocale(LC_NUMERIC, "C");
    holds(w.text && strcmp(w.text, "0.5") == 0, "the point is written", w.text ? w.text : "");
    holds(value == 0.5, "a number is refused or right", "");
    json_writer_free(&w);
    if (read) json_free(&json);
    verdict("json: locale with a decimal comma");
}

static void test_json_doubles(void) {
    Error error;
    const size_t count = 200000;
    JsonWriter w;
    memset(&w, 0, sizeof w);
    json_write_begin(&w, '[');
    for (size_t i = 0; i < count; i++) {
        uint64_t bits = random64(1, i);
        double x;
        if (i % 3 == 1) bits &= 0x800FFFFFFFFFFFFFull;  // subnormal
        memcpy(&x, &bits, sizeof x);
        json_write_number(&w, i % 3 == 2 ? (double)(float)x : x);
    }
    json_write_end(&w, ']');
    Json json;
    bool good = json_write_done(&w, &error) && json_parse(&json, w.text, w.bytes, "doubles", &error);
    holds(good, "is read back", error.text);
    uint32_t node = good ? json_first(&json, 0) : JSON_NONE;
    for (size_t i = 0; good && i < count; i++, node = json_next(&json, node)) {
        uint64_t bits = random64(1, i);
        double x, y = 0;
        if (i % 3 == 1) bits &= 0x800FFFFFFFFFFFFFull;
        memcpy(&x, &bits, sizeof x);
        if (i % 3 == 2) x = (double)(float)x;
        bool same = isfinite(x) ? json_number(&json, node, &y) && memcmp(&x, &y, sizeof x) == 0
                                : json_is(&json, node, JSON_NULL);
        holds(same, "the same bits", "double");
    }
    if (good) json_free(&json);
    json_writer_free(&w);
    verdict("json: random doubles, write and read, bits");
}

// ------------------------------------------------------------------------------------------------
// Files and directories

static void test_files(void) {
    Error error;
    char* data;
    size_t bytes;
    const char* path = "file", *other = "absent/file";
    int descriptors = open_descriptors();
    holds(file_write_atomic(path, "old", 3, &error) && reads_as(path, "old", 3), "write and read", error.text);
    holds(file_write_atomic(path, "", 0, &error) && reads_as(path, "", 0), "no bytes", error.text);
    holds(file_write_atomic(path, "old", 3, &error) && reads_as(path, "old", 3), "replace", error.text);
    holds(file_read(path, 3, &data, &bytes, &error) && data[3] == 0, "a zero byte follows", error.text);
    free(data);
    holds(!file_read(path, 2, &data, &bytes, &error) && !data && strstr(error.text, "more than the 2"), "too large",
          error.text);
    holds(!file_read(other, 9, &data, &bytes, &error) && strstr(error.text, other), "read an absent file", error.text);
    holds(!file_read(".", 9, &data, &bytes, &error) && strstr(error.text, "not a file"), "read a directory",
          error.text);
    holds(!file_read("/dev/zero", 9, &data, &bytes, &error) && strstr(error.text, "not a file"), "read a device",
          error.text);
    holds(!file_write_atomic(other, "new", 3, &error) && strstr(error.text, other) &&
          strstr(error.text, "No such file or directory"), "no parent", error.text);
    const char* inside = "file/inside";
    holds(!file_write_atomic(inside, "new", 3, &error) && reads_as(path, "old", 3), "parent is a file", error.text);
    const char* directory = "directory";
    holds(directory_make(directory, &error), "make", error.text);
    holds(!file_write_atomic(directory, "new", 3, &error) && strstr(error.text, "name a file, not a directory"),
          "write over a directory", error.text);
    holds(directory_remove(directory, &error), "remove", error.text);
    holds(!file_write_atomic("", "new", 3, &error), "no path", "");
    char* long_path = (char*)malloc(10000);
    memset(long_path, 'x', 9999);
    long_path[9999] = 0;
    holds(!file_write_atomic(long_path, "new", 3, &error) && strstr(error.text, "too long"), "a long path", error.text);
    long_path[300] = 0;
    holds(!file_write_atomic(long_path, "new", 3, &error) && strstr(error.text, "File name too long"), "a long name",
          error.text);
    free(long_path);
    holds(directory_count(".", ".tmp-") == 0, "no temporary file is left", "");

    char stale[600];
    snprintf(stale, sizeof stale, "%s.tmp-%ld-0", path, (long)getpid());
    holds(put(stale, "stale", 5), "a leftover of a killed process", "");
    holds(file_write_atomic(path, "old", 3, &error) && reads_as(path, "old", 3), "is no hindrance", error.text);
    holds(reads_as(stale, "stale", 5), "and is left alone", "");
    unlink(stale);
    holds(open_descriptors() == descriptors, "no descriptor is left open", "");
    verdict("files: read, replace, refuse");
}

static void test_files_ragged(void) {
    Error error;
    const char* path = "ragged";
    size_t bytes = 10000001;
    char* data = (char*)malloc(bytes);
    for (size_t i = 0; i < bytes; i++) data[i] = (char)(i * 7 + (i >> 13));
    fault_ragged = true;
    holds(file_write_atomic(path, data, bytes, &error), "write", error.text);
    holds(reads_as(path, data, bytes), "read", "");
    fault_ragged = false;
    holds(reads_as(path, data, bytes), "read again", "");
    free(data);
    unlink(path);
    verdict("files: short and interrupted reads and writes");
}

static void test_files_full(void) {
    Error error;
    const char* path = "file";
    static char data[100000];
    struct rlimit limit, small;
    getrlimit(RLIMIT_FSIZE, &limit);
    small = limit;
    small.rlim_cur = 1000;
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &small);
    bool good = file_write_atomic(path, data, sizeof data, &error);
    setrlimit(RLIMIT_FSIZE, &limit);
    signal(SIGXFSZ, SIG_DFL);
    holds(!good && strstr(error.text, "File too large; raise the limit"), "limit on file sizes", error.text);
    holds(reads_as(path, "old", 3) && directory_count(".", ".tmp-") == 0, "the old file is there, no other", "");

    FileWriter w;
    holds(file_begin(&w, path, &error), "begin", error.text);
    int full = open("/dev/full", O_WRONLY);
    if (full >= 0) {
        dup2(full, w.file);
        close(full);
        good = file_append(&w, data, sizeof data, &error);
        holds(!good && strstr(error.text, "No space left on device; free some space"), "a full disk", error.text);
        holds(!file_append(&w, data, 1, &error) && !file_end(&w, &error), "what follows fails too", error.text);
    }
    file_abort(&w);
    holds(reads_as(path, "old", 3) && directory_count(".", ".tmp-") == 0, "the old file is there, no other", "");
    verdict("files: full disk, limit on sizes");
}

// In a child that is not the superuser, whom rights do not bind.
static void test_files_read_only(void) {
    const char *directory = "locked", *path = "locked/file";
    Error error;
    holds(directory_make(directory, &error) && file_write_atomic(path, "old", 3, &error), "prepare", error.text);
    chmod(directory, 0555);
    pid_t child = fork();
    if (child == 0) {
        if (getuid() == 0 && (setgid(65534) != 0 || setuid(65534) != 0)) _exit(2);
        error.text[0] = 0;
        bool good = file_write_atomic(path, "new", 3, &error);
        _exit(!good && strstr(error.text, "Permission denied; choose a place") ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    holds(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a write is refused",
          "in a directory that may not be changed");
    holds(reads_as(path, "old", 3) && directory_count(directory, "") == 1, "the old file is there, no other", "");
    chmod(directory, 0755);
    holds(directory_remove(directory, &error), "remove", error.text);
    verdict("files: read-only directory");
}

// What a power cut may not undo: a file is flushed before it takes its name, the directory of the name after it.
static void test_order(void) {
    Error error;
    const char* path = "order", *from = "order/from", *to = "order/to";
    fault_reset(0);
    holds(directory_make(path, &error), "make", error.text);
    holds(strcmp(fault_trace, "mof") == 0, "mkdir, flush of the parent", fault_trace);
    holds(directory_make(from, &error), "make", error.text);
    const char* file = "order/from/file";
    fault_reset(0);
    holds(file_write_atomic(file, "new", 3, &error), "write", error.text);
    holds(strcmp(fault_trace, "owfrof") == 0, "open, write, flush, rename, flush of the directory", fault_trace);
    fault_reset(0);
    holds(directory_rename_sync(from, to, &error), "rename", error.text);
    holds(strcmp(fault_trace, "ofrof") == 0, "flush of the directory, rename, flush of the parent", fault_trace);
    fault_reset(0);
    holds(directory_remove(to, &error), "remove", error.text);
    size_t calls = strlen(fault_trace);
    holds(calls > 3 && strcmp(fault_trace + calls - 3, "dof") == 0, "rmdir, flush of the parent", fault_trace);
    holds(directory_remove(path, &error), "remove", error.text);
    verdict("files, directories: order of writes, flushes and renames");
}

// A program that begins without standard files: what it opens first takes the place of none.
static void test_standard(void) {
    int status = -1;
    pid_t child = fork();
    if (child == 0) {
        for (int file = 0; file <= 2; file++) close(file);
        files_open_standard();
        _exit(open("/dev/null", O_RDONLY));
    }
    holds(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) > 2,
          "standard files that were closed", "");
    verdict("files: standard input, output and error");
}

static void test_directories(void) {
    Error error;
    const char *a = "a", *deep = "a/b//c/", *file = "a/b/c/file", *c = "a/b/c";
    const char *moved = "a/b/moved", *b = "a/b", *link_path = "link";
    holds(directory_make(deep, &error) && directory_exists(c), "make with parents", error.text);
    holds(directory_make(deep, &error), "make what exists", error.text);
    holds(file_write_atomic(file, "x", 1, &error), "a file in it", error.text);
    holds(!directory_make(file, &error) && strstr(error.text, "File exists"), "make over a file", error.text);
    holds(!directory_make("", &error), "make nothing", error.text);
    holds(directory_sync(c, &error) && !directory_sync(file, &error), "flush", error.text);
    holds(directory_rename_sync(c, moved, &error) && directory_exists(moved), "rename", error.text);
    holds(!directory_rename_sync(c, moved, &error), "rename what is absent", error.text);
    holds(directory_make(c, &error) && !directory_rename_sync(c, moved, &error) && strstr(error.text, "move it away"),
          "rename over a full one", error.text);
    holds(!directory_remove(b, &error) && directory_exists(moved), "remove one with directories", error.text);
    holds(symlink("a/b/moved", link_path) == 0 && directory_exists(link_path) && !directory_remove(link_path, &error) &&
          directory_count(moved, "file") == 1, "a link is not followed", error.text);
    holds(directory_remove(c, &error) && directory_remove(moved, &error) && directory_remove(b, &error) &&
          directory_remove(a, &error) && !directory_exists(a), "remove", error.text);
    holds(directory_remove(a, &error), "remove what is absent", error.text);
    unlink(link_path);
    verdict("directories: make, flush, rename, remove");
}

// ------------------------------------------------------------------------------------------------
// Safetensors

// One tensor of every type, no dimension, one, many, and none of a size. The data are a pattern of the place.
typedef struct {
    const char* name;
    Dtype type;
    int dims;
    size_t shape[3];
} Sample;
static const Sample samples[] = {
    {"nothing", DTYPE_F32, 2, {0, 5, 0}}, {"f64", DTYPE_F64, 2, {3, 2, 0}},
    {"i64", DTYPE_I64, 1, {3, 0, 0}},     {"u64", DTYPE_U64, 0, {0, 0, 0}},
    {"f32", DTYPE_F32, 3, {2, 1, 3}},     {"i32", DTYPE_I32, 0, {0, 0, 0}},
    {"u32", DTYPE_U32, 1, {2, 0, 0}},     {"f16", DTYPE_F16, 1, {3, 0, 0}},
    {"bf16", DTYPE_BF16, 2, {1, 5, 0}},   {"i16", DTYPE_I16, 1, {1, 0, 0}},
    {"u16", DTYPE_U16, 0, {0, 0, 0}},     {"i8", DTYPE_I8, 1, {7, 0, 0}},
    {"middle", DTYPE_I8, 1, {0, 0, 0}},   {"u8 \xC3\xA9\"", DTYPE_U8, 1, {3, 0, 0}},
    {"bool", DTYPE_BOOL, 2, {2, 2, 0}},   {"end", DTYPE_BF16, 3, {4, 0, 4}},
};
#define SAMPLES (sizeof samples / sizeof *samples)

static size_t sample_bytes(const Sample* sample) {
    size_t bytes = dtype_bytes(sample->type);
    for (int i = 0; i < sample->dims; i++) bytes *= sample->shape[i];
    return bytes;
}

static unsigned char sample_byte(size_t sample, size_t place) {
    if (samples[sample].type == DTYPE_BOOL) return place % 2;
    return (unsigned char)(sample * 31 + place * 7);
}

static bool samples_write(const char* path, size_t piece, uint64_t* header_hash, uint64_t* hashes, Error* error) {
    SafetensorsWriter w;
    unsigned char data[256];
    size_t total = 0, done = 0;
    bool good = safetensors_create(&w, path, error) && safetensors_metadata(&w, "format", "pt", error);
    for (size_t i = 0; good && i < SAMPLES; i++) {
        good = safetensors_declare(&w, samples[i].name, samples[i].type, samples[i].shape, samples[i].dims, error);
        for (size_t k = 0; k < sample_bytes(&samples[i]); k++) data[total++] = sample_byte(i, k);
    }
    good = good && safetensors_begin(&w, error);
    for (; good && done < total; done += piece)
        good = safetensors_write(&w, data + done, min_size(piece, total - done), error);
    good = good && safetensors_end(&w, error);
    if (good) *header_hash = w.header.hash;
    for (size_t i = 0; good && i < SAMPLES; i++) hashes[i] = w.header.tensors[i].hash;
    safetensors_writer_free(&w);
    return good;
}

// Reads all; the checksum of the header and then of each tensor.
static bool samples_read(const char* path, uint64_t* hashes, Error* error) {
    SafetensorsFile f;
    char data[4096];
    if (!safetensors_open(&f, path, error)) return false;
    bool good = true;
    hashes[0] = f.header.hash;
    for (size_t i = 0; good && i < SAMPLES; i++) {
        const SafetensorsTensor* tensor = safetensors_find(&f, samples[i].name);
        if (!tensor || tensor->bytes > sizeof data) good = fail(error, "%s is missing or too large", samples[i].name);
        good = good && safetensors_read(&f, tensor, data, tensor->bytes, &hashes[i + 1], error);
    }
    safetensors_close(&f);
    return good;
}

static void test_safetensors_round_trip(void) {
    Error error;
    const char* path = "round.safetensors";
    uint64_t header_hash = 0, hashes[SAMPLES] = {0};
    SafetensorsFile f;
    for (size_t piece = 1; piece < 200; piece += piece < 20 ? 1 : 50) {
        holds(samples_write(path, piece, &header_hash, hashes, &error), "is written", error.text);
        bool good = safetensors_open(&f, path, &error);
        holds(good, "is opened", error.text);
        if (!good) continue;
        holds(f.header.count == SAMPLES && f.header.hash == header_hash, "the header", "");
        char* file_data = NULL;
        size_t file_bytes = 0;
        good = file_read(path, 1 << 20, &file_data, &file_bytes, &error) && file_bytes > f.data_start &&
               hash_bytes(file_data, f.data_start) == f.header.hash;
        holds(good, "the checksum is of all that stands before the data", error.text);
        free(file_data);
        char format[4];
        uint32_t metadata = json_get(&f.header.json, 0, "__metadata__");
        holds(json_string(&f.header.json, json_get(&f.header.json, metadata, "format"), format, 4), "metadata", "");
        for (size_t i = 0; i < SAMPLES; i++) {
            const SafetensorsTensor* tensor = safetensors_find(&f, samples[i].name);
            bool same = tensor == &f.header.tensors[i] && tensor->type == samples[i].type &&
                        tensor->dims == samples[i].dims && tensor->bytes == sample_bytes(&samples[i]);
            for (int k = 0; same && k < tensor->dims; k++) same = tensor->shape[k] == samples[i].shape[k];
            holds(same, "type and shape", samples[i].name);
            if (!same) continue;
            unsigned char data[256], part[256];
            uint64_t hash = 0;
            good = safetensors_read(&f, tensor, data, tensor->bytes, &hash, &error) && hash == hashes[i];
            good = good && hash == hash_bytes(data, tensor->bytes);
            for (size_t k = 0; good && k < tensor->bytes; k++) good = data[k] == sample_byte(i, k);
            holds(good, "data and checksum", samples[i].name);
            holds(!safetensors_read(&f, tensor, data, tensor->bytes + 1, NULL, &error), "a wrong size", error.text);
            for (size_t first = 0; first <= tensor->bytes; first++) {
                size_t n = (tensor->bytes - first) / 2;
                good = safetensors_read_range(&f, tensor, first, n, part, &error) && memcmp(part, data + first, n) == 0;
                holds(good, "a range", error.text);
            }
            holds(!safetensors_read_range(&f, tensor, tensor->bytes, 1, part, &error), "beyond the end", error.text);
            good = safetensors_read_range(&f, tensor, 1, SIZE_MAX, part, &error);
            holds(!good && strstr(error.text, "were asked of"), "a range that overflows", error.text);
            good = safetensors_read_range(&f, tensor, tensor->bytes + 1, 0, part, &error);
            holds(!good && strstr(error.text, "were asked of"), "a range that begins beyond the end", error.text);
        }
        holds(safetensors_find(&f, "absent") == NULL && safetensors_find(&f, "__metadata__") == NULL, "absent", "");
        safetensors_close(&f);
    }
    verdict("safetensors: every type, odd shapes, pieces of any size");
}

static void test_safetensors_damage(void) {
    Error error;
    const char* path = "round.safetensors", *copy = "damaged.safetensors";
    uint64_t good_hashes[SAMPLES + 1], hashes[SAMPLES + 1];
    char* data = NULL;
    size_t bytes = 0, refused = 0, by_checksum = 0;
    holds(samples_read(path, good_hashes, &error) && file_read(path, 1 << 20, &data, &bytes, &error), "read",
          error.text);
    for (size_t i = 0; i < bytes; i++) {
        for (int bit = 0; bit <= 8; bit++) {
            char flip = bit < 8 ? (char)(1 << bit) : (char)0xFF;
            data[i] ^= flip;
            memset(hashes, 0, sizeof hashes);
            bool written = put(copy, data, bytes);
            bool good = samples_read(copy, hashes, &error);
            refused += !good;
            by_checksum += good && memcmp(hashes, good_hashes, sizeof hashes) != 0;
            holds(written && (!good || memcmp(hashes, good_hashes, sizeof hashes) != 0), "a flipped byte is seen", "");
            data[i] ^= flip;
        }
    }
    printf("  %zu flips of a file of %zu bytes: %zu refused, %zu told by a checksum\n", 9 * bytes, bytes, refused,
           by_checksum);
    for (size_t cut = 0; cut < bytes; cut++) {
        bool good = put(copy, data, cut) && !samples_read(copy, hashes, &error);
        holds(good && strstr(error.text, copy), "a cut file is refused", error.text);
    }
    char* longer = (char*)calloc(bytes + 9, 1);
    memcpy(longer, data, bytes);
    for (size_t more = 1; more <= 9; more++)
        holds(put(copy, longer, bytes + more) && !samples_read(copy, hashes, &error), "a longer file", "");
    free(longer);

    SafetensorsFile f;  // cut while it is open
    holds(put(copy, data, bytes) && safetensors_open(&f, copy, &error), "open", error.text);
    holds(truncate(copy, (off_t)bytes - 1) == 0, "cut", "");
    const SafetensorsTensor* last = &f.header.tensors[f.header.count - 2];
    holds(!safetensors_read(&f, last, longer = (char*)malloc(last->bytes), last->bytes, NULL, &error) &&
          strstr(error.text, "1 bytes early"), "cut while it is open", error.text);
    free(longer);
    safetensors_close(&f);
    free(data);
    unlink(copy);
    verdict("safetensors: flipped bytes, cut files");
}

static void test_safetensors_headers(void) {
    // Each with 8 bytes of data after it; ' stands for the quotation mark.
    static const char* const good[] = {
        "{'a':{'dtype':'F32','shape':[2],'data_offsets':[0,8]}}",
        "{'b':{'dtype':'F32','shape':[],'data_offsets':[4,8]},"
        "'a':{'shape':[1],'data_offsets':[0,4],'dtype':'I32'}}",
        "{'__metadata__':{},"
        "'a':{'dtype':'U8','shape':[2,2,2],'data_offsets':[0,8]}}      ",
        "{'a':{'dtype':'U8','shape':[8],'data_offsets':[0,8]},"
        "'b':{'dtype':'U8','shape':[0],'data_offsets':[8,8]}}",
        "{'a':{'dtype':'U8','shape':[8],'data_offsets':[0,8]},"
        "'b':{'dtype':'U8','shape':[0],'data_offsets':[0,0]}}",
        "{'a':{'dtype':'U8','shape':[1,1,1,1,1,1,1,8],'data_offsets':[0,8]}}",
    };
    static const char* const bad[] = {
        "", "{}", "[]", "1",
        " {'a':{'dtype':'F32','shape':[2],'data_offsets':[0,8]}}",
        "{'a':{'dtype':'F32','shape':[2],'data_offsets':[0,8]}}x",
        "{'a':1}", "{'a':{}}", "{'a':[1,2,3]}",
        "{'__metadata__':{'x':1},"
        "'a':{'dtype':'F32','shape':[2],'data_offsets':[0,8]}}",
        "{'__metadata__':[],'a':{'dtype':'F32','shape':[2],'data_offsets':[0,8]}}",
        "{'a':{'dtype':'F33','shape':[2],'data_offsets':[0,8]}}",
        "{'a':{'dtype':1,'shape':[2],'data_offsets':[0,8]}}",
        "{'a':{'dtype':'F32F32F32F32','shape':[2],'data_offsets':[0,8]}}",
        "{'a':{'dtype':'F32','shape':2,'data_offsets':[0,8]}}",
        "{'a':{'dtype':'F32','shape':[2.0],'data_offsets':[0,8]}}",
        "{'a':{'dtype':'F32','shape':[-2],'data_offsets':[0,8]}}",
        "{'a':{'dtype':'F32','shape':[3],'data_offsets':[0,8]}}",
        "{'a':{'dtype':'F32','shape':['2'],'data_offsets':[0,8]}}",
        "{'a':{'dtype':'F32','shape':[2],'data_offsets':[0,8],'x':1}}",
        "{'a':{'dtype':'F32','shape':[2]}}",
        "{'a':{'dtype':'F32','shape':[2],'data_offsets':[0]}}",
        "{'a':{'dtype':'F32','shape':[2],'data_offsets':[0,8,8]}}",
        "{'a':{'dtype':'F32','shape':[2],'data_offsets':[8,0]}}",
        "{'a':{'dtype':'F32','shape':[2],'data_offsets':[8,16]}}",
        "{'a':{'dtype':'F32','shape':[1],'data_offsets':[0,4]}}",
        "{'a':{'dtype':'F32','shape':[1],'data_offsets':[4,8]}}",
        "{'a':{'dtype':'F32','shape':[4],'data_offsets':[0,16]}}",
        "{'a':{'dtype':'F32','shape':[2],'data_offsets':[0,3]}}",
        "{'a':{'dtype':'U8','shape':[4294967296,4294967296],'data_offsets':[0,0]},"
        "'b':{'dtype':'F64','shape':[],'data_offsets':[0,8]}}",
        "{'a':{'dtype':'F64','shape':[2305843009213693953],'data_offsets':[0,8]}}",
        "{'a':{'dtype':'U8','shape':[18446744073709551615],'data_offsets':[0,18446744073709551615]}}",
        "{'a':{'dtype':'U8','shape':[6],'data_offsets':[0,6]},"
        "'b':{'dtype':'U8','shape':[4],'data_offsets':[4,8]}}",
        "{'a':{'dtype':'U8','shape':[8],'data_offsets':[0,8]},"
        "'b':{'dtype':'U8','shape':[8],'data_offsets':[0,8]}}",
        "{'a':{'dtype':'U8','shape':[3],'data_offsets':[0,3]},"
        "'b':{'dtype':'U8','shape':[4],'data_offsets':[4,8]}}",
        "{'a':{'dtype':'U8','shape':[8],'data_offsets':[0,8]},"
        "'b':{'dtype':'U8','shape':[0],'data_offsets':[4,4]}}",
        "{'a':{'dtype':'F32','shape':[2],'data_offsets':[0,8]},"
        "'a':{'dtype':'F32','shape':[2],'data_offsets':[0,8]}}",
        "{'':{'dtype':'F32','shape':[2],'data_offsets':[0,8]}}",
        "{'a\\u0000':{'dtype':'F32','shape':[2],'data_offsets':[0,8]}}",
        "{'a\\n':{'dtype':'F32','shape':[2],'data_offsets':[0,8]}}",
        "{'a':{'dtype':'U8','shape':[1,1,1,1,1,1,1,1,8],'data_offsets':[0,8]}}",
    };
    Error error;
    const char* path = "header.safetensors";
    char data[4096];
    size_t good_count = sizeof good / sizeof *good, count = good_count + sizeof bad / sizeof *bad;
    for (size_t i = 0; i < count; i++) {
        const char* header = i < good_count ? good[i] : bad[i - good_count];
        uint64_t length = strlen(header);
        memcpy(data, &length, 8);
        memcpy(data + 8, header, length);
        for (size_t k = 8; k < 8 + length; k++)
            if (data[k] == '\'') data[k] = '"';
        memset(data + 8 + length, 'x', 8);
        SafetensorsFile f;
        bool opened = put(path, data, 16 + length) && safetensors_open(&f, path, &error);
        holds(opened == (i < good_count), i < good_count ? "must be accepted" : "must be refused", header);
        if (opened) safetensors_close(&f);
    }
    static const uint64_t lengths[] = {0, 1, 63, 1000, 100000001, UINT64_MAX, UINT64_MAX - 7, (uint64_t)1 << 63};
    for (size_t i = 0; i < 8; i++) {
        SafetensorsFile f;
        memcpy(data, &lengths[i], 8);
        holds(put(path, data, 64) && !safetensors_open(&f, path, &error), "a wrong length", "");
    }
    size_t large = 20000000, n = 8;  // many tensors in a header of many bytes: refused for their number, not for memory
    char* text = (char*)malloc(large);
    n += (size_t)sprintf(text + n, "{");
    for (int i = 0; i < 70000; i++)
        n += (size_t)sprintf(text + n, "%s\"%d\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}", i ? "," : "",
                             i);
    n += (size_t)sprintf(text + n, "}");
    uint64_t length = n - 8;
    memcpy(text, &length, 8);
    SafetensorsFile f;
    holds(put(path, text, n) && !safetensors_open(&f, path, &error) && strstr(error.text, "too many tensors"),
          "too many tensors", error.text);
    free(text);
    unlink(path);
    verdict("safetensors: headers accepted and refused");
}

static void test_safetensors_alignment(void) {
    Error error;
    const char* path = "alignment.safetensors";
    for (size_t length = 1; length <= SAFETENSORS_NAME_MAX; length++) {
        char name[SAFETENSORS_NAME_MAX + 1] = {0};
        memset(name, 'n', length);
        SafetensorsWriter w;
        bool good = safetensors_create(&w, path, &error) &&
                    safetensors_declare(&w, name, DTYPE_BF16, NULL, 0, &error) && safetensors_begin(&w, &error) &&
                    safetensors_write(&w, "xy", 2, &error) && safetensors_end(&w, &error);
        safetensors_writer_free(&w);
        holds(good == (length < SAFETENSORS_NAME_MAX), "a name of each length, up to the limit", error.text);
        SafetensorsFile f;
        if (!good || !safetensors_open(&f, path, &error)) continue;
        holds(f.data_start % 8 == 0 && safetensors_find(&f, name) != NULL, "the data begin at a multiple of 8", name);
        safetensors_close(&f);
    }
    unlink(path);
    verdict("safetensors: length of names, alignment");
}

static void test_safetensors_misuse(void) {
    Error error;
    const char* path = "misuse.safetensors";
    size_t two = 2, huge[2] = {(size_t)1 << 40, (size_t)1 << 40};
    char name[400];
    memset(name, 'n', sizeof name - 1);
    name[sizeof name - 1] = 0;
    for (int way = 0; way < 14; way++) {
        SafetensorsWriter w;
        bool good = file_write_atomic(path, "old", 3, &error) && safetensors_create(&w, path, &error);
        holds(good, "begin", error.text);
        if (!good) continue;
        if (way == 9)
            good = good && safetensors_metadata(&w, "a", "b", &error) && safetensors_metadata(&w, "a", "c", &error);
        const char* first = way == 0 ? "" : way == 1 ? name : way == 2 ? "__metadata__" : way == 3 ? "a\n" : "a";
        good =
            good && safetensors_declare(&w, first, DTYPE_F32, way == 4 ? huge : &two, way == 4 ? 2 : 1, &error);
        if (way == 5) good = good && safetensors_declare(&w, "a", DTYPE_F32, &two, 1, &error);
        if (way == 6) good = good && safetensors_declare(&w, "b", DTYPE_F32, &two, 9, &error);
        if (way == 7) good = good && safetensors_metadata(&w, "late", "x", &error);
        if (way == 13) good = good && safetensors_declare(&w, "b", DTYPE_F32, &two, -1, &error);
        if (way != 8) good = good && safetensors_begin(&w, &error);
        good = good && safetensors_write(&w, "12345678", way == 10 ? 7 : way == 11 ? 0 : 8, &error);
        if (way == 12) good = good && safetensors_write(&w, "9", 1, &error);
        good = good && safetensors_end(&w, &error);
        holds(!good && error.text[0], "a mistake is told", error.text);
        safetensors_writer_free(&w);
        holds(reads_as(path, "old", 3) && directory_count(".", ".tmp-") == 0, "the old file is there, no other", "");
    }
    SafetensorsWriter w;
    holds(safetensors_create(&w, path, &error) && safetensors_begin(&w, &error) && safetensors_end(&w, &error),
          "a file without tensors", error.text);
    safetensors_writer_free(&w);
    SafetensorsFile f;
    bool opened = safetensors_open(&f, path, &error);
    holds(opened && f.header.count == 0, "is read", error.text);
    if (opened) safetensors_close(&f);
    unlink(path);
    verdict("safetensors: mistakes of the caller");
}

// ------------------------------------------------------------------------------------------------
// Every call into the system fails once

static bool operation_write(Error* error) { return file_write_atomic("fault", "new", 3, error); }
static bool operation_read(Error* error) {
    char* data;
    size_t bytes;
    if (!file_read("file", 100, &data, &bytes, error)) return false;
    free(data);
    return true;
}
static bool operation_directories(Error* error) {
    const char *from = "x/y", *to = "x/z", *file = "x/y/file";
    return directory_make(from, error) && file_write_atomic(file, "new", 3, error) &&
           directory_rename_sync(from, to, error) && directory_remove(to, error) &&
           directory_remove("x", error);
}
static bool operation_safetensors_write(Error* error) {
    uint64_t header_hash, hashes[SAMPLES];
    return samples_write("fault", 37, &header_hash, hashes, error);
}
static bool operation_safetensors_read(Error* error) {
    uint64_t hashes[SAMPLES + 1];
    return samples_read("round.safetensors", hashes, error);
}
static bool operation_json_write(Error* error) {
    JsonWriter w;
    memset(&w, 0, sizeof w);
    json_write_begin(&w, '[');
    for (int i = 0; i < 1000; i++) json_write_number(&w, i / 7.0);
    json_write_end(&w, ']');
    bool good = json_write_done(&w, error);
    json_writer_free(&w);
    return good;
}

static void test_faults(void) {
    typedef bool (*Operation)(Error*);
    static const struct { Operation run; const char* name; int least; } operations[] = {  // points of failure, at least
        {operation_write, "file_write_atomic", 4}, {operation_read, "file_read", 4},
        {operation_directories, "directories", 20}, {operation_safetensors_write, "safetensors, written", 13},
        {operation_safetensors_read, "safetensors, read", 4}, {operation_json_write, "json, written", 5},
    };
    const char* path = "fault";
    Error error;
    for (int i = 0; i < 6; i++) {
        int points = 0;
        for (;; points++) {
            file_write_atomic(path, "old", 3, &error);
            int descriptors = open_descriptors();
            error.text[0] = 0;
            fault_reset(points + 1);
            bool good = operations[i].run(&error);
            fault_at = 0;  // the count stays
            bool reached = fault_calls > points;
            if (good || !reached) {
                holds(good && !reached, operations[i].name, "without a fault it succeeds, with one it fails");
                break;
            }
            holds(strlen(error.text) > 20, "the failure is told", operations[i].name);
            holds(open_descriptors() == descriptors, "no descriptor is left open", operations[i].name);
            holds(directory_count(".", ".tmp-") == 0, "no temporary file is left", operations[i].name);
            uint64_t hashes[SAMPLES + 1];
            Error ignored;
            bool whole = i == 3 ? samples_read(path, hashes, &ignored) : reads_as(path, "new", 3);
            holds(whole || reads_as(path, "old", 3), "the old file is there, or the new one, whole",
                  operations[i].name);
            if (i == 2) {  // what is left of the directories
                unlink("x/y/file");
                holds(directory_remove("x/y", &ignored) && directory_remove("x/z", &ignored) &&
                      directory_remove("x", &ignored), "can be removed", ignored.text);
            }
        }
        char detail[60];
        snprintf(detail, sizeof detail, "%d points of failure, at least %d expected", points, operations[i].least);
        holds(points >= operations[i].least, operations[i].name, detail);
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
    if (system("python3 -c 'import safetensors, numpy' >/dev/null 2>&1") != 0) {
        skip("safetensors: interchange with Python", "there is no python3 with safetensors and numpy");
        return;
    }
    Error error;
    const char *ours = "round.safetensors", *theirs = "theirs.safetensors", *script = "check.py";
    char command[2048];
    holds(put(script, python_check, strlen(python_check)), "the script", "");
    snprintf(command, sizeof command, "python3 '%s' '%s' '%s'", script, ours, theirs);
    FILE* pipe = popen(command, "w");
    need(pipe != NULL, "python3 starts");
    for (size_t i = 0; i < SAMPLES; i++) {
        fprintf(pipe, "%s\t%s\t", samples[i].name, DTYPES[samples[i].type].safetensors);
        for (int k = 0; k < samples[i].dims; k++) fprintf(pipe, "%s%zu", k ? "," : "", samples[i].shape[k]);
        fprintf(pipe, "\t");
        for (size_t k = 0; k < sample_bytes(&samples[i]); k++) fprintf(pipe, "%02x", sample_byte(i, k));
        fprintf(pipe, "\n");
    }
    holds(pclose(pipe) == 0, "Python reads what we write", "see its message above");

    SafetensorsFile f;
    bool good = safetensors_open(&f, theirs, &error);
    holds(good, "we read what Python writes", error.text);
    if (good) {
        const SafetensorsTensor *a = safetensors_find(&f, "a"), *b = safetensors_find(&f, "b"),
                                *c = safetensors_find(&f, "c"), *d = safetensors_find(&f, "d");
        float floats[6] = {0};
        int64_t integer = 0;
        unsigned char truths[3] = {9, 9, 9};
        holds(a && a->type == DTYPE_F32 && a->dims == 2 && a->shape[0] == 2 && a->shape[1] == 3 &&
              safetensors_read(&f, a, floats, sizeof floats, NULL, &error) && floats[0] == 0 && floats[5] == 5,
              "float32", "");
        holds(b && b->type == DTYPE_I64 && b->dims == 0 && safetensors_read(&f, b, &integer, 8, NULL, &error) &&
              integer == 7, "int64 without dimension", "");
        holds(c && c->type == DTYPE_F16 && c->bytes == 0 && c->shape[1] == 4, "float16 of size zero", "");
        holds(d && d->type == DTYPE_BOOL && safetensors_read(&f, d, truths, 3, NULL, &error) && truths[0] == 1 &&
              truths[1] == 0 && truths[2] == 1, "bool", "");
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
    test_order();
    test_standard();
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
