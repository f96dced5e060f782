// presets.h: models by name, and a configuration from a preset and flags.
//
//   Config config;
//   bool ok = config_preset(&config, "gpt2:124M", &error) && config_complete(&config, &error);
//   ok = config_set(&config, "layers=24 heads=16", &error);
//
// A preset gives the sizes that define the model; config_complete (llmtrain.h) fills in what follows from them.

#ifndef LLMTRAIN_PRESETS_H
#define LLMTRAIN_PRESETS_H

#include "../../llmtrain.h"
#include "../base/flags.h"

// Sets members from text: "layers=12 heads=12".
static inline bool config_set(Config* c, const char* text, Error* error) {
    char name[32], value[32];
    for (int length; sscanf(text, " %31[^=]=%31s%n", name, value, &length) == 2; text += length) {
        size_t i = 0;
        while (i < CONFIG_FIELD_COUNT && strcmp(CONFIG_FIELDS[i].name, name) != 0) i++;
        if (i == CONFIG_FIELD_COUNT) return fail_with(error, "a model has no member '%s'", name);
        Flag flag = field_flag(&CONFIG_FIELDS[i], c);
        if (!flag_set(&flag, value, error)) return false;
    }
    return true;
}

typedef struct {
    const char *names, *members;  // names: several separated by |
} Preset;

// The GPT-2 sizes of the paper, these and more by llm.c's names for depths; llama2.c's small Llamas, then Llama 3.
#define PRESET_GPT2 " family=gpt2 context=1024 vocab=50257 tied=on"
#define PRESET_LLAMA2C " family=llama vocab=32000 tied=on rope_theta=10000"
#define PRESET_LLAMA3 " family=llama context=8192 vocab=128256 kv_heads=8 rope_theta=500000"
static const Preset PRESETS[] = {
    {"gpt2:124M|gpt2:d12",  "layers=12 heads=12 channels=768" PRESET_GPT2},
    {"gpt2:350M|gpt2:d24",  "layers=24 heads=16 channels=1024" PRESET_GPT2},
    {"gpt2:774M|gpt2:d36",  "layers=36 heads=20 channels=1280" PRESET_GPT2},
    {"gpt2:1558M|gpt2:d48", "layers=48 heads=25 channels=1600" PRESET_GPT2},
    {"gpt2:d6",             "layers=6 heads=6 channels=384" PRESET_GPT2},
    {"gpt2:d60",            "layers=60 heads=30 channels=1920" PRESET_GPT2},
    {"gpt2:d72",            "layers=72 heads=30 channels=2880" PRESET_GPT2},
    {"gpt2:d84",            "layers=84 heads=36 channels=3456" PRESET_GPT2},
    {"llama:15M",           "layers=6 heads=6 channels=288 ffn=768 context=256" PRESET_LLAMA2C},
    {"llama:42M",           "layers=8 heads=8 channels=512 ffn=1376 context=1024" PRESET_LLAMA2C},
    {"llama:110M",          "layers=12 heads=12 channels=768 ffn=2048 context=1024" PRESET_LLAMA2C},
    {"llama:1B",            "layers=16 heads=32 channels=2048 ffn=8192 tied=on" PRESET_LLAMA3},
    {"llama:3B",            "layers=28 heads=24 channels=3072 ffn=8192 tied=on" PRESET_LLAMA3},
    {"llama:8B",            "layers=32 heads=32 channels=4096 ffn=14336 tied=off" PRESET_LLAMA3},
    {"llama:70B",           "layers=80 heads=64 channels=8192 ffn=28672 tied=off" PRESET_LLAMA3},
    {"llama:405B",          "layers=126 heads=128 channels=16384 ffn=53248 tied=off" PRESET_LLAMA3},
};
enum { PRESET_COUNT = sizeof PRESETS / sizeof PRESETS[0] };

// Sets *c to a preset; config_complete fills in the rest.
static inline bool config_preset(Config* c, const char* name, Error* error) {
    char known[512] = "";
    for (size_t i = 0; i < PRESET_COUNT; i++) {
        size_t used = strlen(known);
        snprintf(known + used, sizeof known - used, "%s%s", i ? " " : "", PRESETS[i].names);
        if (choice_find(PRESETS[i].names, name) < 0) continue;
        memset(c, 0, sizeof *c);
        return config_set(c, PRESETS[i].members, error);
    }
    for (char* p = known; *p; p++) *p = *p == '|' ? ' ' : *p;
    return fail_with(error, "there is no model '%s'; give one of %s, or the sizes one by one", name, known);
}

// Sets *c to a preset, unless that is NULL, and overrides it with the members of `asked` whose flags were given.
static inline bool config_choose(Config* c, const char* preset, Config* asked, Flags* flags, Error* error) {
    memset(c, 0, sizeof *c);
    c->tied = asked->tied;
    if (preset && !config_preset(c, preset, error)) return false;
    if (asked->heads || asked->channels) c->kv_heads = c->ffn = 0;  // a preset's do not fit other heads or channels
    for (size_t i = 0; i < CONFIG_FIELD_COUNT; i++) {
        const Field* field = &CONFIG_FIELDS[i];
        Flag flag = field_flag(field, asked);
        bool given = field->help && flag_was_given(flags, field->flag);
        if (given && (field->kind != KIND_COUNT || flag_value_count(&flag) > 0))
            memcpy((char*)c + field->offset, flag.value, field_bytes(field->kind));
    }
    return true;
}

#endif  // LLMTRAIN_PRESETS_H
