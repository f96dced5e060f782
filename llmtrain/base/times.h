// times.h: the time of day, as logs have it: Unix time, in seconds, or a date and time in UTC.

#ifndef LLMTRAIN_TIMES_H
#define LLMTRAIN_TIMES_H

#include "json.h"

// Now, to the millisecond.
static inline double unix_time(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (double)now.tv_sec + 1e-3 * (double)(now.tv_nsec / 1000000);
}

// That of "2026-11-22T10:51:18.633Z"; NAN for other texts.
static inline double unix_time_of(const char* text) {
    long year, month, day, hour, minute;
    double second;
    if (sscanf(text, "%ld-%ld-%ldT%ld:%ld:%lfZ", &year, &month, &day, &hour, &minute, &second) != 6) return NAN;
    if (month < 1 || month > 12) return NAN;
    year -= month <= 2;  // the year begins in March, so that a leap day is its last
    long month_days = (153 * (month + (month > 2 ? -3 : 9)) + 2) / 5;
    long days = 365 * year + year / 4 - year / 100 + year / 400 + month_days + day - 1 - 719468;
    return (double)(((days * 24 + hour) * 60 + minute) * 60) + second;
}

// The time of a line of a log, either way.
static inline bool json_time(const Json* json, uint32_t node, double* seconds) {
    char text[64];
    if (!json_string(json, node, text, sizeof text)) return json_number(json, node, seconds);
    double time = unix_time_of(text);
    if (!isnan(time)) *seconds = time;
    return !isnan(time);
}

#endif  // LLMTRAIN_TIMES_H
