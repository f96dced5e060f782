// test_schedule.c: the tables of pipelines (llmtrain/ranks/schedule.h), all kinds with 1 to 16 stages, 1 to 64
// micro-batches and 1 to 4 chunks, with equal costs and with random ones.
//
//   cc -std=c11 -O2 -I. dev/test/test_schedule.c -o build/test_schedule -lm -pthread && build/test_schedule
//
//   lists      each operation once; forward, backward and weights of a micro-batch in this order; slots: never shared
//              by two live activations, the lowest that is free, no more than the limit of the kind
//   execution  the messages of each channel are received in the order in which they are sent; stages end when the
//              table says; with room for as many messages in a channel as there are stages all tables run to the end,
//              with room for one or two only some interleaved ones do not
//   bubbles    the time that is lost is that of the formulas
//   sizes      that are refused, and thousands of micro-batches
//
// The execution shares no code with the header: a stage executes its list, and waits for what it needs.

#include "llmtrain/ranks/schedule.h"
#include "harness.h"

enum { STAGES = 16, MICROS = 64, CHUNKS = 4, PIECES = STAGES * CHUNKS, KINDS = 5 };
static const char* const NAMES[KINDS] = {"gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2"};

typedef struct {
    PipelineKind kind;
    size_t S, m, V;
    const double* costs;  // (PIPELINE_WORKS, S)
    double hop;
    PipelineTable table;
} Case;

static const char* case_name(const Case* c) {
    return text_of("%s, %zu stages, %zu micro-batches, %zu chunks, %s costs", NAMES[c->kind], c->S, c->m, c->V,
                   c->hop > 0 ? "random" : "equal");
}

// ------------------------------------------------------------------------------------------------
// Lists

static void limits(const Case* c, size_t stage, size_t* ahead, size_t* held) {
    size_t left = c->S - stage, interleaved = 2 * (left - 1) + (c->V - 1) * c->S + 1;
    const size_t of_ahead[KINDS] = {c->m, left, interleaved, left, 2 * left - 1};
    const size_t of_held[KINDS] = {c->m, left, interleaved, c->S, 2 * c->S - 1};
    *ahead = of_ahead[c->kind];
    *held = of_held[c->kind];
}

// A stage's list: what is in it, and its slots.
static bool list_good(const Case* c, size_t stage) {
    const PipelineTable* t = &c->table;
    static uint8_t done[CHUNKS][MICROS];  // operations of a chunk and micro-batch
    static uint16_t slot[CHUNKS][MICROS];
    static bool taken[CHUNKS * MICROS + 1];
    size_t works = c->kind >= PIPELINE_ZB_H1 ? 3 : 2, peak = 0, live = 0, forwards = 0, ahead, held;
    bool good = t->begins[stage + 1] - t->begins[stage] == works * c->m * c->V;
    memset(done, 0, sizeof done);
    memset(taken, 0, sizeof taken);
    limits(c, stage, &ahead, &held);
    for (size_t i = t->begins[stage]; good && i < t->begins[stage + 1]; i++) {
        const PipelineOp* op = &t->ops[i];
        good = op->chunk < c->V && op->micro < c->m && op->work < works && done[op->chunk][op->micro]++ == op->work;
        if (!good) break;
        if (op->work == PIPELINE_FORWARD) {
            size_t lowest = 0;
            while (taken[lowest]) lowest++;
            good = op->slot == lowest;
            slot[op->chunk][op->micro] = op->slot;
            taken[op->slot] = true;
            live++;
            forwards++;
        }
        good = good && op->slot == slot[op->chunk][op->micro] && forwards <= ahead && live <= held;
        peak = max_size(peak, live);
        forwards -= op->work == PIPELINE_BACKWARD;
        if (op->work == works - 1) taken[op->slot] = false, live--;
    }
    return good && live == 0 && peak == t->slots[stage];
}

// ------------------------------------------------------------------------------------------------
// Execution

// Executes a table. room: messages that wait in a channel, beyond which their sender waits. Fails at a deadlock, and
// where a message is not the next of its channel. ends (S): when each stage has ended, which does not count waiting for
// room.
typedef struct { uint8_t chunk; uint32_t micro; double at; } Message;
typedef struct { Message* messages; size_t sent, received; } Channel;

static bool execute(const Case* c, size_t room, double* ends, bool* in_order) {
    static Message messages[2][STAGES][CHUNKS * MICROS];  // to a stage: of forwards, of backwards
    static double ended[PIPELINE_WORKS][PIECES][MICROS];
    const PipelineTable* t = &c->table;
    Channel channels[2][STAGES];
    size_t next[STAGES], finished = 0, S = c->S;
    bool waits[STAGES] = {false};  // to send
    for (size_t s = 0; s < S; s++) {
        next[s] = t->begins[s];
        ends[s] = 0;
        for (int back = 0; back < 2; back++) channels[back][s] = (Channel){messages[back][s], 0, 0};
    }
    *in_order = true;
    for (bool moved = true; moved;) {
        moved = false;
        for (size_t s = 0; s < S; s++) {
            for (; next[s] < t->begins[s + 1]; next[s]++, moved = true) {
                const PipelineOp* op = &t->ops[next[s]];
                size_t piece = op->chunk * S + s, back = op->work == PIPELINE_BACKWARD;
                bool receives = back ? piece + 1 < S * c->V : op->work == PIPELINE_FORWARD && piece > 0;
                bool sends = back ? piece > 0 : op->work == PIPELINE_FORWARD && piece + 1 < S * c->V;
                Channel* in = &channels[back][s];
                Channel* out = &channels[back][(s + (back ? S - 1 : 1)) % S];
                double start = op->work ? fmax(ends[s], ended[op->work - 1][piece][op->micro]) : ends[s];
                if (!waits[s]) {
                    if (receives) {
                        if (in->sent == in->received) break;
                        const Message* got = &in->messages[in->received++];
                        if (got->micro != op->micro || got->chunk != op->chunk) return *in_order = false;
                        start = fmax(start, got->at);
                    }
                    ends[s] = start + c->costs[op->work * S + s];
                    if (back && !t->splits) ends[s] += c->costs[PIPELINE_WEIGHTS * S + s];
                    ended[op->work][piece][op->micro] = ends[s];
                }
                waits[s] = sends && S > 1 && out->sent - out->received >= room;
                if (waits[s]) break;
                size_t to = back ? piece - 1 : piece + 1;
                if (sends) out->messages[out->sent++] = (Message){(uint8_t)(to / S), op->micro,
                                                                  ends[s] + (S > 1 ? c->hop : 0)};
            }
        }
    }
    for (size_t s = 0; s < S; s++) finished += next[s] == t->begins[s + 1];
    return finished == S;
}

// ------------------------------------------------------------------------------------------------
// All tables

// Tables whose bubble has a formula; those that stop with room for one message, for two.
static size_t known, stuck[KINDS][2];

// Operations that all take 1: the time that a stage is idle, and what it holds.
static void bubble_expect(const Case* c) {
    double S = (double)c->S, m = (double)c->m, V = (double)c->V, lost = (S - 1) * (c->kind < PIPELINE_ZB_H1 ? 3 : 1);
    bool formula = c->kind == PIPELINE_INTERLEAVED ? c->m % c->S == 0 : c->kind == PIPELINE_ZB_H1 ? c->m >= c->S :
        c->kind != PIPELINE_ZB_H2 || c->m + 1 >= 2 * c->S;
    if (formula) expect(c->table.end == 3 * m * V + lost, "%s: ends after %g", case_name(c), c->table.end);
    for (size_t s = 0; s < c->S && c->m >= 2 * c->S && c->kind < PIPELINE_ZB_H1; s++) {
        size_t held, ahead;
        limits(c, s, &ahead, &held);
        expect(c->table.slots[s] == held, "%s: stage %zu holds %zu", case_name(c), s, c->table.slots[s]);
    }
    known += formula;
}

static void table_expect(const Case* c) {
    double ends[STAGES], end = 0;
    bool in_order, good = c->table.splits == (c->kind >= PIPELINE_ZB_H1);
    for (size_t s = 0; s < c->S; s++)
        if (!list_good(c, s)) expect(false, "%s: the list of stage %zu", case_name(c), s);
    bool runs = execute(c, c->S, ends, &in_order);
    for (size_t s = 0; runs && s < c->S; s++) {
        good = good && ends[s] == c->table.ends[s];
        end = fmax(end, ends[s]);
    }
    expect(runs && in_order, "%s: %s", case_name(c), in_order ? "a deadlock" : "a message that is not the next");
    expect(!runs || (good && end == c->table.end), "%s: ends after %g, not %g", case_name(c), end, c->table.end);
    if (c->hop > 0) return;
    bubble_expect(c);
    for (size_t room = 1; room <= 2; room++) stuck[c->kind][room - 1] += !execute(c, room, ends, &in_order);
}

// Makes and examines tables of all sizes; of random costs, whole numbers so that sums are exact, of every fifth size.
static size_t tables_examine(bool random) {
    double costs[PIPELINE_WORKS * STAGES];
    size_t sizes = 0, made = 0;
    for (size_t kind = 0; kind < KINDS; kind++)
        for (size_t i = 0; i < STAGES * MICROS * (kind == PIPELINE_INTERLEAVED ? CHUNKS : 1); i++) {
            Case c = {(PipelineKind)kind, 1 + i % STAGES, 1 + i / STAGES % MICROS, 1 + i / (STAGES * MICROS), costs, 0,
                      {0}};
            Error error;
            if (sizes++ % 5 && random) continue;
            for (size_t k = 0; k < PIPELINE_WORKS * c.S; k++)
                costs[k] = random ? 1 + (double)(random_bits(sizes, RANDOM_TEST, 0, k) % 100) : 1;
            if (random) c.hop = 1 + (double)(random_bits(sizes, RANDOM_TEST, 1, 0) % 20);
            need(pipeline_table_make(&c.table, c.kind, c.S, c.m, c.V, random ? costs : NULL, c.hop, &error), "%s: %s",
                 case_name(&c), error.text);
            table_expect(&c);
            pipeline_table_free(&c.table);
            made++;
        }
    return made;
}

static void test_tables(void) {
    size_t n = tables_examine(false);
    verdict("%zu tables of equal costs: lists, slots, messages, ends, and %zu bubbles", n, known);
    n = tables_examine(true);
    verdict("%zu tables of random costs: lists, slots, messages, ends", n);
    for (size_t kind = 0; kind < KINDS; kind++)
        if (kind == PIPELINE_INTERLEAVED)
            check(stuck[kind][0] == 1890 && stuck[kind][1] == 873,
                  "with room for one message, %zu interleaved tables stop; for two, %zu", stuck[kind][0],
                  stuck[kind][1]);
        else
            check(stuck[kind][0] + stuck[kind][1] == 0, "with room for one message, or two, no table of %s stops",
                  NAMES[kind]);
}

// ------------------------------------------------------------------------------------------------
// Sizes

static void test_sizes(void) {
    static const struct { PipelineKind kind; size_t S, m, V; } refused[] = {
        {PIPELINE_1F1B, 0, 1, 1}, {PIPELINE_1F1B, 1, 0, 1}, {PIPELINE_1F1B, 1, 1, 0}, {PIPELINE_GPIPE, 2, 4, 2},
        {PIPELINE_ZB_H1, 2, 4, 2}, {PIPELINE_INTERLEAVED, 2, 4, 256}, {PIPELINE_1F1B, 65536, 1, 1},
        {PIPELINE_GPIPE, 1, 65536, 1}, {PIPELINE_INTERLEAVED, 512, 4, 255},
    };
    PipelineTable t;
    Error error;
    for (size_t i = 0; i < COUNT_OF(refused); i++) {
        bool made = pipeline_table_make(&t, refused[i].kind, refused[i].S, refused[i].m, refused[i].V, NULL, 0, &error);
        expect(!made && t.ops == NULL && strstr(error.text, "is too large, or has chunks and is not interleaved"), "size %zu is made", i);
    }
    verdict("sizes that no pipeline has are refused");
    double began_ms = now_ms();
    bool made = pipeline_table_make(&t, PIPELINE_1F1B, 64, 1024, 1, NULL, 0, &error);
    check(made && t.end == 3 * (1024 + 63) && now_ms() < began_ms + 2e3, "64 stages, 1024 micro-batches: %.0f ms",
          now_ms() - began_ms);
    pipeline_table_free(&t);
    made = pipeline_table_make(&t, PIPELINE_GPIPE, 2, 65535, 1, NULL, 0, &error);
    check(made && t.slots[0] == 65535 && t.end == 3 * (65535.0 + 1), "2 stages, 65535 micro-batches, all of them held");
    pipeline_table_free(&t);
    made = pipeline_table_make(&t, PIPELINE_INTERLEAVED, 2, 3, 255, NULL, 0, &error);
    check(made && t.ops[t.begins[1] - 1].chunk == 0, "2 stages of 255 chunks");
    pipeline_table_free(&t);
}

int main(void) {
    tests_begin("test_schedule");
    test_tables();
    test_sizes();
    return tests_end();
}
