// questions.h: questions about the stories of corpus.h, with answers that are words of the story.
//
//   if (question_ask(&q, &story, seed, number)) ...        q.question, q.answer; false: the story answers none
//
// So whether a model has learned to answer is a matter of equal texts. What a story says is found again in its text by
// the words that come before the answer; which of the questions that it answers is asked depends on the seed.

#ifndef LLMTRAIN_QUESTIONS_H
#define LLMTRAIN_QUESTIONS_H

#include "corpus.h"

#include <ctype.h>

enum { QUESTION_BYTES = 128 };

typedef struct {
    char question[QUESTION_BYTES], answer[QUESTION_BYTES];
} Question;

static const struct {
    const char* cues;      // what comes before the answer, separated by |
    const char* question;  // * is the hero's name
    int words;             // of the answer
    const char* lead;      // what the answer begins with
} QUESTIONS[] = {
    {" with ", "Who was with *?", 3, ""},
    {"She lost |He lost ", "What did * lose?", 4, ""},
    {"So she wore |So he wore ", "What did * wear?", 4, ""},
    {" dreamed of ", "What did * dream of?", 4, ""},
    {" it in ", "What was it in?", 4, "in "},
    {" felt ", "How did * feel?", 3, ""},
    {"Then she |Then he ", "What did * do then?", 6, ""},
    {" It was ", "Where was it?", 3, ""},
};
enum { QUESTION_COUNT = sizeof QUESTIONS / sizeof QUESTIONS[0] };

// The length of the first `words` words of a text, without a sign behind them; 0: a sentence ends before.
static inline size_t words_length(const char* text, int words) {
    size_t length = 0;
    for (int i = 0; i < words; i++) {
        if (i > 0 && text[length] != ' ') return 0;
        length += i > 0;
        size_t word = strspn(text + length, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ");
        if (word == 0) return 0;
        length += word;
    }
    return length;
}

// The name of the hero: the first word or, in an opening that begins with something else, the one that comes after its
// mark.
static inline size_t hero_find(const char** name, const char* story) {
    static const char* const marks[] = {" named ", ", "};
    bool other = strncmp(story, "A ", 2) == 0 || strncmp(story, "An ", 3) == 0, day = strncmp(story, "One ", 4) == 0;
    const char* mark = other ? marks[0] : day ? marks[1] : NULL;
    *name = mark ? strstr(story, mark) : story;
    if (*name == NULL) return 0;
    if (mark) *name += strlen(mark);
    return words_length(*name, 1);
}

// Where the answer to question i begins in a story; NULL: the story does not say.
static inline const char* answer_find(int i, const char* story) {
    for (const char* cue = QUESTIONS[i].cues; *cue; cue += *cue == '|') {
        char text[32];
        size_t length = strcspn(cue, "|");
        snprintf(text, sizeof text, "%.*s", (int)length, cue);
        cue += length;
        const char* found = strstr(story, text);
        if (found && words_length(found + length, QUESTIONS[i].words) > 0) return found + length;
    }
    return NULL;
}

// text: of a story, ends with a zero. number: chooses, with the seed, among the questions that it answers.
static inline bool question_ask(Question* q, const char* text, uint64_t seed, uint64_t number) {
    const char *name, *answers[QUESTION_COUNT];
    int asked[QUESTION_COUNT], count = 0;
    size_t hero = hero_find(&name, text);
    for (int i = 0; i < QUESTION_COUNT; i++) {
        answers[count] = answer_find(i, text);
        asked[count] = i;
        count += answers[count] != NULL;
    }
    if (count == 0 || hero == 0) return false;
    int k = (int)(random_bits(seed, RANDOM_CORPUS, 1, number) % (unsigned)count), i = asked[k];
    const char* star = strchr(QUESTIONS[i].question, '*');
    if (star) snprintf(q->question, sizeof q->question, "%.*s%.*s%s", (int)(star - QUESTIONS[i].question),
                       QUESTIONS[i].question, (int)hero, name, star + 1);
    else snprintf(q->question, sizeof q->question, "%s", QUESTIONS[i].question);
    snprintf(q->answer, sizeof q->answer, "%s%.*s.", QUESTIONS[i].lead,
             (int)words_length(answers[k], QUESTIONS[i].words), answers[k]);
    q->answer[0] = (char)toupper((unsigned char)q->answer[0]);
    return true;
}

#endif  // LLMTRAIN_QUESTIONS_H
