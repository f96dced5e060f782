// corpus.h: small English stories from a probabilistic grammar, each with its exact probability.
//
//   1. the stories     the grammar, as text: the one place to edit
//   2. the tables      the grammar compiled: symbols, choices, pieces
//   3. the generator   one story from (seed, number), and the sum of -ln p over its choices
//
// The grammar gives each text at most one derivation. So the sum over a story's choices is -ln of the probability of
// its text, and the mean over many stories is the entropy of the source: the loss that no model can beat.
// dev/test/test_corpus.c proves it with a parser that sums over all derivations.

#ifndef LLMTRAIN_CORPUS_H
#define LLMTRAIN_CORPUS_H

#include "../llmtrain/ops/base.h"

// ------------------------------------------------------------------------------------------------
// 1. The stories
//
// A line is a symbol and its choices, separated by " / ". A choice may begin with its weight, a whole number and a
// space (1 if it has none); its probability is its weight over the sum of the symbol's weights. A symbol may have
// several lines: their choices are put together. The first symbol is a story. Inside a choice:
//
//   {thing}         one choice of the symbol `thing`
//   {gift:thing}    the same, and it is remembered until the story ends as the variable `gift`
//   {gift.0}        the remembered words again
//   {hero.1}        the remembered choice's form 1. Forms are set at the symbol: in the line "name|he|him|his", form 1
//                   of each choice is "he", form 2 "him", form 3 "his"
//   {@pet.1}        one choice of the symbol that is named by form 1: an owl does what flying animals do
//   {^hero.1}       any of these with its first letter capitalized
//
// Two choices of a symbol may begin alike, but what follows must tell them apart: never two ways to one text. A
// variable is set before it is used. dev/test/test_corpus.c finds violations of either rule. It also measures the loss
// from starting in the middle of a story: it is small, since remembered words come back soon, and not often.

static const char* const corpus_lines[][2] = {
    {"story",
     "6 {opening} {early} {late} {ending}\n\n / 1 {opening} {gift} {late} {gift ending}\n\n / "
     "1 {opening} {visit} {late} {visit ending}\n\n / 3 {opening} {early} {ending}\n\n / "
     "1 {opening} {late} {ending}\n\n"},

    // Who, and where.
    {"opening",
     "4 {hero:name} was {a trait}, {mood} {hero.4} with {number} {trait} {creatures}. / "
     "4 {hero:name} the {trait} {animal} {lived} {at} {a scene} {place} with {number} {trait} {creatures}. / "
     "3 One {weather} {daytime}, {hero:name} {went} to {a scene} {place} with {hero.3} {trait} {relative}. / "
     "4 {A trait} {animal} named {hero:name} {sold} {look} {color} {things} {at} {a scene} {place}. / "
     "4 {hero:name} had {number} {trait} {creatures}, {a look} {color} {thing} and {look} {things}."},

    // What happened first: something is found or given, somebody comes, something is lost.
    {"early", "4 {gift} / 3 {visit} / 2 {loss}"},
    {"gift",
     "1 {^hero.1} {found} {a look} {color} {gift:thing} {at} {a scene} {place}. {with it} / "
     "1 {^hero.3} {trait} {relative} {gave} {hero.2} {a look} {gift:thing} and {number} {color} {things}. {with "
       "it}"},
    {"with it",
     "1 \"What {a look} {gift.0}!\" {said} {hero.3} {trait} {relative}. / "
     "3 {^hero.1} {hid} it {near} {a look} {color} {spot}. / "
     "3 {^hero.1} {hid} it in {a look} {color} {box}. / "
     "1 {^hero.1} used it to {use} {number} {look} {things}."},
    {"visit", "{A trait} {color} {pet:animal} {sat} {near} the {spot}. {with pet}"},
    {"with pet",
     "3 It {@pet.1} and {act}. / "
     "2 \"I {saw} {number} {look} {things},\" it {said}. / "
     "2 \"My {relative} lost {a look} {color} {thing},\" it {said}. / "
     "1 \"Is my {look} {thing} {near} the {spot}?\" {asked} the {pet.0}. / "
     "1 They {act} and {act2} until {hour}."},
    {"loss", "{^hero.1} lost {hero.3} {look} {color} {wear} {at} {a scene} {place}. {without it}"},
    {"without it",
     "3 It was {near} the {spot} with {number} {look} {things}. / "
     "3 {A trait} {color} {animal} {hid} it {near} the {spot}. / "
     "2 So {hero.1} wore {a look} {color} {wear}."},

    // What happened next.
    {"late",
     "3 {^then} {hero.1} {cooked} {taste} {dish} with {food}, {herb} and {fruit}. / "
     "1 {^then} {storm} came, so {hero.1} {went} to {a scene} {place}. / "
     "6 {He} {counted} {number} {color} {things}, {number} {trait} {creatures} and {a look} {thing}. / "
     "3 {He} {grew} {number} {color} {flowers} and {fruit} {near} the {spot}. / "
     "4 At {hour} {hero.1} dreamed of {a trait} {color} {animal} that {dreamed}."},
    {"dreamed",
     "1 {air} / 1 {water} / 1 {land} / 2 {act} and {act2} / 2 had {look} {color} {things} / "
     "2 wore {a look} {wear}"},

    // How it ended.
    {"ending",
     "2 {^hero.1} felt {mood} and {feeling}. / "
     "1 {hero.0} {act} and {act2} until {hour}. / "
     "3 {^hero.3} {trait} {relative} {act} too. / "
     "4 Then {hero.1} {slept} {near} {a look} {color} {spot}. / "
     "3 \"{^closing},\" {said} {hero.3} {relative}."},
    {"gift ending",
     "1 {^hero.1} {gave} the {gift.0} to {a trait} {relative}. / "
     "1 The {gift.0} made {hero.2} {mood} and {feeling}."},
    {"visit ending",
     "1 The {pet.0} {slept} {near} {hero.3} {look} {spot}. / "
     "1 {hero.0} and the {pet.0} {act} and {act2}."},

    // Words.
    {"He", "9 {^hero.1} / 1 {hero.0}"},
    {"name|she|her|her|girl", "2 Anna / 2 Mia / 2 Lily / Ella / Rosa / 2 Nora / Ruby / Ivy / 2 Zoe / 2 Lucy / Molly / "
     "Ada / Clara / 2 Emma / Eve / June / 2 Kate / Maya / Nina / Olive / Sara / Lena / Tess / Pia"},
    {"name|he|him|his|boy", "2 Tom / 2 Max / 2 Ben / 2 Sam / 2 Leo / Finn / 2 Jack / Hugo / Otis / 2 Theo / Noah / "
     "Liam / Owen / Eli / 2 Luke / Adam / Felix / Henry / Ian / Miles / Otto / 2 Pete / Ravi / Karl"},
    {"relative", "mother / father / sister / brother / aunt / uncle / cousin / friend / dad / mom / granny / twin / "
     "nurse / son / niece / boss"},

    {"animal|air", "2 owl / 2 crow / robin / swan / goose / 2 bee / bat / eagle / finch / stork / moth / fly"},
    {"animal|water", "2 duck / 2 frog / 2 fish / otter / 2 crab / whale / seal / newt / toad / eel"},
    {"animal|land", "2 fox / 2 cat / 2 dog / 2 pig / 2 goat / horse / mouse / 2 bear / wolf / hen / lamb / cow / "
     "deer / snail / sheep / mole / tiger / lion / panda / camel / pony / hare / ant / rat / ox"},
    {"air", "flew over {a scene} {place} / perched on {a look} {spot} / sang {near} the {spot}"},
    {"water", "swam in {a scene} {pool} / dived for {look} {things} / splashed {look} {things}"},
    {"land", "ran to {a scene} {place} / slept {near} {a look} {spot} / dug {near} the {spot}"},
    {"pool", "lake / pond / river"},
    {"creatures", "2 ducks / 2 frogs / kittens / 2 birds / snails / pups / mice / geese / lambs / bees / crows / "
     "ants / hens / sheep / goats / chicks / ponies / worms / swans / 2 pigs / 2 fish / foxes / owls / 2 cats / "
     "2 dogs / cows / moths / crabs / moles / toads / seals / bears / flies / calves / cubs / bats / rats / eels"},

    {"a trait", "14 a {trait} / 3 an {open trait}"},
    {"A trait", "14 A {trait} / 3 An {open trait}"},
    {"open trait", "odd / old / eager / angry"},
    {"trait", "2 kind / 2 shy / 2 brave / smart / funny / lazy / calm / young / 2 quiet / sweet / 2 little / 2 tall / "
     "silly / 2 wise / busy / grumpy / proud / merry / 2 bold / neat / quick / slow / plump / gentle / 2 clever / "
     "jolly / dreamy / fussy / nosy / dizzy / tidy / strong / wild / sly / noisy / fat / thin / poor / rich / polite / "
     "keen / small / loud / vain"},
    {"a look", "14 a {look} / 2 an {open look}"},
    {"open look", "old / odd / ugly"},
    {"look", "2 tiny / 2 shiny / pretty / 2 dusty / 2 big / 2 small / 2 new / dirty / plain / bright / bent / fine / "
     "nice / cheap / rare / wet / cold / smooth / muddy / magic / huge / sticky / clean / worn / pale / dull / fancy / "
     "broken / cute / grand / warm / long / rough / damp / good / flat / round / strange / lovely / secret / short / "
     "heavy / wide / neat"},
    {"a scene", "12 a {scene} / 2 an {open scene}"},
    {"open scene", "old / icy / empty"},
    {"scene", "wide / dark / quiet / sunny / windy / misty / lonely / hidden / big / small / pretty / busy / dusty / "
     "shady / sleepy / muddy / snowy / wild / lovely / hot / cool / green / calm / new / cold / warm"},
    {"color", "red / blue / green / yellow / white / black / brown / pink / purple / grey / gold / silver / orange / "
     "tan / teal"},
    {"number", "two / three / four / five / six / seven / eight / nine / ten / eleven / twelve / many / some"},

    {"thing", "key / shell / coin / feather / button / ribbon / stone / ring / bottle / map / bell / book / letter / "
     "lamp / cup / spoon / kite / ball / drum / doll / brush / mirror / candle / clock / flute / rope / nail / wheel / "
     "mask / fan / comb / jar / brick / stamp / crown / pen / pot / harp / toy / pipe / fork / sled / whistle / "
     "puzzle / ladder / globe / mop / saw"},
    {"things", "boats / books / shells / trains / stones / drums / cakes / kites / bells / flags / hats / cups / "
     "pots / rings / lamps / pens / plates / bowls / spoons / coins / dolls / tents / carts / chairs / clocks / keys / "
     "blocks / toys / bikes / leaves / balls / maps / jars / sticks / cards / masks / nails / sleds / combs / forks / "
     "beds / wigs / nuts / socks"},
    {"box", "box / bag / basket / chest / tin / sack / jug / trunk / crate / case"},
    {"flowers", "roses / tulips / daisies / lilies / poppies / seeds / bulbs / weeds / ferns / vines"},
    {"wear", "2 hat / 2 coat / scarf / glove / boot / sock / shoe / cap / shirt / jacket / belt / vest / cape / "
     "skirt / bow / hood / watch / wig"},
    {"food", "honey / nuts / bread / butter / jam / corn / rice / beans / peas / milk / cream / eggs / ham / oats / "
     "leeks / onions"},
    {"herb", "mint / salt / ginger / pepper / garlic / basil / thyme / sage / dill / cocoa / oil / chili"},
    {"fruit", "apples / plums / pears / cherries / grapes / berries / figs / dates / peaches / melons / olives / "
     "limes / kiwis"},
    {"dish", "2 soup / 2 pie / 2 cake / stew / salad / pizza / tarts / curry / toast / rolls / buns"},
    {"taste",
     "2 sweet / good / sour / spicy / warm / fresh / hot / salty / thick / crisp / cold / tasty / mild / rich"},

    {"place", "2 forest / 2 river / 2 lake / 2 pond / 2 hill / 2 farm / beach / 2 market / park / 2 garden / village / "
     "meadow / bay / school / castle / valley / field / town / mill / inn / island / cave / road / zoo / swamp / "
     "port / camp / shop / hut / path"},
    {"spot", "bed / table / oak / bench / gate / fence / wall / bridge / swing / chair / shed / barn / window / "
     "stove / cart / bush / sofa / tent / tower / rock / log / desk / shelf / roof / piano / stool / pump / rug / "
     "tree / hedge / stump / sink / pole / crib / arch"},
    {"at", "at / near / by / beyond / behind"},
    {"near", "near / behind / under / on / by"},

    {"weather", "sunny / rainy / cold / warm / windy / snowy / foggy / bright / hot / cloudy / wet / cool / misty / "
     "grey / dark / icy"},
    {"daytime", "2 morning / 2 evening / 2 day / 2 night / Sunday / Monday / Friday / spring / autumn / winter"},
    {"hour", "2 night / dawn / noon / dusk / one / two / four / five / six / nine / ten"},
    {"storm", "rain / snow / hail / fog / wind / frost"},
    {"mood", "2 happy / sad / proud / 2 tired / calm / 2 glad / lucky / bored / jolly / sleepy / lonely / hungry / "
     "merry / cold / silly / brave / dizzy / cozy"},
    {"feeling", "warm / curious / safe / strong / full / free / quiet / loved / rich / wise / hopeful / clever / shy / "
     "grand / ready / new / well / bold"},

    {"then", "then / soon / later / once / next / now"},
    {"went", "2 went / 2 walked / 2 ran / hiked / raced / rode / crept / hopped / jogged / rushed / danced / sailed / "
     "drove / skated"},
    {"sat", "2 sat / stood / slept / hid / lay / sang / ate / danced / cried / played / hummed / woke / hopped / "
     "rested / waited"},
    {"lived", "2 lived / worked / slept / sat / played / fished / cooked / camped / hid"},
    {"sold", "sold / made / kept / hid / found / washed / drew / lost"},
    {"saw", "saw / lost / found / need / want / sold / made / hid / fear"},
    {"found", "found / saw / dug up / bought / took / got / stole"},
    {"gave", "2 gave / sent / lent / sold / showed"},
    {"hid", "hid / kept / put / left / set"},
    {"use", "buy / clean / fix / make / find / hide / paint"},
    {"said", "2 said / cried / called / sang / sighed / yelled / joked / hissed"},
    {"asked", "asked / cried / begged / called / wept"},
    {"act", "2 laughed / 2 smiled / 2 sang / giggled / 2 danced / clapped / cheered / yawned / waved / cried / bowed / "
     "hummed / nodded / hopped / blushed / sneezed / grinned / winked / jumped / sighed"},
    {"act2", "2 played / talked / 2 read / ate / drew / rested / shouted / sat / wrote / counted / swam / prayed / "
     "skipped / argued / baked / sewed / ran / dug"},
    {"cooked", "made / ate / tried / sold / shared"},
    {"counted", "counted / saw / met / drew / fed / washed / led"},
    {"grew", "grew / picked / sold / cut / drew"},
    {"slept", "2 slept / rested / 2 sat / waited / read / snored / dozed / prayed / sang / hid / wept"},
    {"closing",
     "good night / I am {mood} / well done / let us eat {fruit} / 2 you are {trait} / bring me {food} / "
     "2 hold my {thing} / 2 here are {number} {things} / 2 I see {a trait} {animal}"},
};

// ------------------------------------------------------------------------------------------------
// 2. The tables
//
// The lines above, cut into pieces once. Nothing is copied: a Span points into the lines. A grammar that cannot be
// compiled (an unknown symbol, a choice that may contain itself) is refused; the message names the place.

enum { MAX_SYMBOLS = 128, MAX_CHOICES = 2048, MAX_PIECES = 4096, MAX_VARIABLES = 8, MAX_FORMS = 6 };
enum { MAX_STORY = 4096 };  // bytes in a story, and random numbers set aside for it; compiling checks that both suffice

typedef struct {
    const char* text;
    int length;
} Span;

typedef enum {
    PIECE_TEXT,     // the bytes of `text`
    PIECE_SYMBOL,   // a choice of `symbol`, remembered as `variable` unless that is -1
    PIECE_FORM,     // form `form` of the choice remembered as `variable`
    PIECE_BY_FORM,  // a choice of the symbol that this form names
} PieceKind;

typedef struct {
    PieceKind kind;
    bool capital;  // the first letter is capitalized
    Span text;
    int symbol, variable, form;
} Piece;

typedef struct {
    uint32_t weight;
    int first_piece, piece_count;
    Span forms[MAX_FORMS];  // forms[0] is the choice's own text; a form that the line does not set has length 0
} Choice;

typedef struct {
    Span name;
    int first_choice, choice_count;
    uint32_t weight;  // the sum over its choices
} Symbol;

typedef struct {
    int symbol_count, choice_count, piece_count, variable_count;
    Symbol symbols[MAX_SYMBOLS];  // symbols[0] is a story
    Choice choices[MAX_CHOICES];
    Piece pieces[MAX_PIECES];
    Span variables[MAX_VARIABLES];
    int variable_symbols[MAX_VARIABLES];  // the one symbol whose choices a variable holds
} Grammar;

// Takes a character off the front of a span, if the span begins with it.
static inline bool span_take(Span* rest, char c) {
    bool taken = rest->length > 0 && rest->text[0] == c;
    rest->text += taken;
    rest->length -= taken;
    return taken;
}

static inline bool span_equal(Span a, Span b) {
    return a.length == b.length && memcmp(a.text, b.text, (size_t)a.length) == 0;
}

// Cuts the text before the first `mark` off the front of `rest` and returns it; all of it if there is no mark.
static inline Span span_cut(Span* rest, const char* mark) {
    int n = (int)strlen(mark), at = 0;
    while (at < rest->length && !(at + n <= rest->length && memcmp(rest->text + at, mark, (size_t)n) == 0)) at++;
    Span head = {rest->text, at};
    int used = at < rest->length ? at + n : at;
    rest->text += used;
    rest->length -= used;
    return head;
}

// The symbol of this name, or -1.
static inline int symbol_find(const Grammar* g, Span name) {
    for (int i = 0; i < g->symbol_count; i++)
        if (span_equal(g->symbols[i].name, name)) return i;
    return -1;
}

// The variable of this name, a new one if there is none yet; -1 when there are too many.
static inline int variable_find(Grammar* g, Span name) {
    for (int i = 0; i < g->variable_count; i++)
        if (span_equal(g->variables[i], name)) return i;
    if (g->variable_count == MAX_VARIABLES) return -1;
    g->variables[g->variable_count] = name;
    g->variable_symbols[g->variable_count] = -1;
    return g->variable_count++;
}

// Parses the text between { and }: ^ or not, then "symbol", "variable:symbol", "variable.form" or "@variable.form".
static inline bool piece_compile(Piece* piece, Grammar* g, Span inside, Error* error) {
    const char* problem = NULL;
    Span all = inside;
    memset(piece, 0, sizeof *piece);
    piece->symbol = piece->variable = -1;
    piece->capital = span_take(&inside, '^');
    bool by_form = span_take(&inside, '@');
    Span form = inside, symbol = inside, head = span_cut(&form, ".");
    if (head.length < inside.length) {
        piece->kind = by_form ? PIECE_BY_FORM : PIECE_FORM;
        piece->variable = variable_find(g, head);
        piece->form = form.length == 1 ? form.text[0] - '0' : -1;
        if (piece->variable < 0 || piece->form < 0 || piece->form >= MAX_FORMS)
            problem = " has too many variables before it or a wrong form";
    } else {
        head = span_cut(&symbol, ":");
        bool named = head.length < inside.length;
        piece->kind = PIECE_SYMBOL;
        piece->symbol = symbol_find(g, named ? symbol : inside);
        if (named) piece->variable = variable_find(g, head);
        int* holds = piece->variable >= 0 ? &g->variable_symbols[piece->variable] : NULL;
        if (piece->symbol < 0) problem = " names no symbol";
        else if (named && !holds) problem = " is one variable too many";
        else if (holds && *holds >= 0 && *holds != piece->symbol)
            problem = ", but this variable holds another symbol elsewhere";
        else if (holds) *holds = piece->symbol;
    }
    return !problem || fail_with(error, "corpus.h: {%.*s}%s", all.length, all.text, problem);
}

// One choice: "4 text with {pieces}", and the forms 1, 2, ... of its line, separated by |.
static inline bool choice_compile(Grammar* g, Span text, Span forms, Error* error) {
    if (g->choice_count == MAX_CHOICES) return fail_with(error, "corpus.h: more than %d choices", MAX_CHOICES);
    Choice* choice = &g->choices[g->choice_count++];
    Span rest = text;
    memset(choice, 0, sizeof *choice);
    int digits = 0;
    for (; rest.length > 0 && rest.text[0] >= '0' && rest.text[0] <= '9'; digits++) {
        choice->weight = 10 * choice->weight + (uint32_t)(rest.text[0] - '0');
        span_take(&rest, rest.text[0]);
    }
    if (digits > 0 && span_take(&rest, ' ')) text = rest;
    else choice->weight = 1;
    if (choice->weight == 0 || digits > 6) return fail_with(error, "corpus.h: a weight must be from 1 to 999999");
    if (text.length == 0) return fail_with(error, "corpus.h: an empty choice");
    choice->forms[0] = text;
    for (int i = 1; forms.length > 0; i++) {
        if (i == MAX_FORMS) return fail_with(error, "corpus.h: more than %d forms", MAX_FORMS);
        choice->forms[i] = span_cut(&forms, "|");
    }
    choice->first_piece = g->piece_count;
    while (text.length > 0) {
        if (g->piece_count + 2 > MAX_PIECES) return fail_with(error, "corpus.h: more than %d pieces", MAX_PIECES);
        Piece words = {.kind = PIECE_TEXT, .text = span_cut(&text, "{")};
        if (words.text.length > 0) g->pieces[g->piece_count++] = words;
        if (text.length == 0) break;
        if (!piece_compile(&g->pieces[g->piece_count++], g, span_cut(&text, "}"), error)) return false;
    }
    choice->piece_count = g->piece_count - choice->first_piece;
    return true;
}

static inline int symbol_longest(const Grammar* g, int symbol, int depth, Error* error);

// The longest text of a piece in bytes, or -1 with the error set: a form that is missing, or not plain words.
static inline int piece_longest(const Grammar* g, const Piece* piece, int depth, Error* error) {
    if (piece->kind == PIECE_TEXT) return piece->text.length;
    if (piece->kind == PIECE_SYMBOL) return symbol_longest(g, piece->symbol, depth + 1, error);
    int longest = -1, held = g->variable_symbols[piece->variable];
    for (int i = 0; held >= 0 && i < g->symbols[held].choice_count; i++) {
        Span form = g->choices[g->symbols[held].first_choice + i].forms[piece->form];
        bool plain = form.length > 0 && !memchr(form.text, '{', (size_t)form.length);
        int length = plain ? form.length : -1;
        if (piece->kind == PIECE_BY_FORM) {
            int symbol = plain ? symbol_find(g, form) : -1;
            length = symbol >= 0 ? symbol_longest(g, symbol, depth + 1, error) : -1;
        }
        longest = length > longest ? length : longest;
        if (length < 0) longest = held = -1;
    }
    Span name = g->variables[piece->variable];
    if (longest < 0)
        fail_with(error, "corpus.h: {%.*s.%d} is not set, or not plain words", name.length, name.text, piece->form);
    return longest;
}

// The longest text of a symbol in bytes, or -1 with the error set: also when it lies inside itself.
static inline int symbol_longest(const Grammar* g, int symbol, int depth, Error* error) {
    const Symbol* s = &g->symbols[symbol];
    int longest = 0;
    if (depth == 16) {
        fail_with(error, "corpus.h: the symbol \"%.*s\" lies too deep, or inside itself", s->name.length, s->name.text);
        return -1;
    }
    for (int c = s->first_choice; c < s->first_choice + s->choice_count; c++) {
        int length = 0;
        for (int i = 0; i < g->choices[c].piece_count; i++) {
            int more = piece_longest(g, &g->pieces[g->choices[c].first_piece + i], depth, error);
            if (more < 0) return -1;
            length += more;
        }
        longest = length > longest ? length : longest;
    }
    return longest;
}

static inline bool grammar_compile(Grammar* g, const char* const lines[][2], size_t line_count, Error* error) {
    memset(g, 0, sizeof *g);
    for (size_t i = 0; i < line_count; i++) {
        Span header = {lines[i][0], (int)strlen(lines[i][0])};
        Span name = span_cut(&header, "|");
        if (symbol_find(g, name) >= 0) continue;
        if (g->symbol_count == MAX_SYMBOLS) return fail_with(error, "corpus.h: more than %d symbols", MAX_SYMBOLS);
        g->symbols[g->symbol_count++].name = name;
    }
    for (int s = 0; s < g->symbol_count; s++) {
        Symbol* symbol = &g->symbols[s];
        symbol->first_choice = g->choice_count;
        for (size_t i = 0; i < line_count; i++) {
            Span forms = {lines[i][0], (int)strlen(lines[i][0])};
            if (!span_equal(span_cut(&forms, "|"), symbol->name)) continue;
            Span text = {lines[i][1], (int)strlen(lines[i][1])};
            while (text.length > 0) {
                if (!choice_compile(g, span_cut(&text, " / "), forms, error)) return false;
                symbol->weight += g->choices[g->choice_count - 1].weight;
            }
        }
        symbol->choice_count = g->choice_count - symbol->first_choice;
    }
    int longest = symbol_longest(g, 0, 0, error);
    if (longest < 0) return false;
    if (longest > MAX_STORY)
        return fail_with(error, "corpus.h: a story may be %d bytes long, over %d", longest, MAX_STORY);
    return true;
}

// ------------------------------------------------------------------------------------------------
// 3. The generator

typedef struct {
    char text[MAX_STORY];
    size_t length;
    double nats;               // -ln of the story's probability
    uint64_t seed, next;       // the index of its next random number
    int bound[MAX_VARIABLES];  // the choice that each variable remembers
} Story;

// A choice of `symbol` with probability weight / sum of weights, exactly: numbers above the largest multiple of the sum
// that 32 bits hold are drawn again.
static inline int story_choose(Story* story, const Grammar* g, int symbol) {
    const Symbol* s = &g->symbols[symbol];
    uint32_t bits, end = (uint32_t)(0x100000000ull / s->weight * s->weight - 1);
    do bits = random_bits(story->seed, RANDOM_CORPUS, 0, story->next++); while (bits > end);
    uint32_t ball = bits % s->weight;
    int choice = s->first_choice;
    while (ball >= g->choices[choice].weight) ball -= g->choices[choice++].weight;
    story->nats += log((double)s->weight / (double)g->choices[choice].weight);
    return choice;
}

static inline void story_add(Story* story, Span words) {
    memcpy(story->text + story->length, words.text, (size_t)words.length);
    story->length += (size_t)words.length;
}

static inline void story_expand(Story* story, const Grammar* g, int symbol, int variable) {
    int chosen = story_choose(story, g, symbol);
    if (variable >= 0) story->bound[variable] = chosen;
    for (int i = 0; i < g->choices[chosen].piece_count; i++) {
        const Piece* piece = &g->pieces[g->choices[chosen].first_piece + i];
        size_t begin = story->length;
        Span form = {"", 0};
        if (piece->kind == PIECE_FORM || piece->kind == PIECE_BY_FORM)
            form = g->choices[story->bound[piece->variable]].forms[piece->form];
        if (piece->kind == PIECE_TEXT) story_add(story, piece->text);
        if (piece->kind == PIECE_FORM) story_add(story, form);
        if (piece->kind == PIECE_SYMBOL) story_expand(story, g, piece->symbol, piece->variable);
        if (piece->kind == PIECE_BY_FORM) story_expand(story, g, symbol_find(g, form), -1);
        char* first = &story->text[begin];
        if (piece->capital && *first >= 'a' && *first <= 'z') *first = (char)(*first - 'a' + 'A');
    }
}

// Story `number` of the stream `seed`: a function of these two alone.
static inline void story_write(Story* story, const Grammar* g, uint64_t seed, uint64_t number) {
    story->length = 0;
    story->nats = 0;
    story->seed = seed;
    story->next = number * MAX_STORY;
    for (int i = 0; i < MAX_VARIABLES; i++) story->bound[i] = 0;
    story_expand(story, g, 0, -1);
}

#endif  // LLMTRAIN_CORPUS_H
