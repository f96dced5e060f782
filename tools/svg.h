// svg.h: charts as text: axes with ticks, lines, bands, dots, a picture of colored cells; and escaping.
//
//   Page page = {0};
//   page_put(&page, "<svg class=\"plot\" height=\"190\">");
//   svg_axis_y(&page, &scale, 5);
//   svg_curves_begin(&page);
//   page_put(&page, "<path class=\"line\" style=\"stroke:var(--c0)\"");
//   svg_line(&page, &scale, x, values, count, false);
//   page_put(&page, "</svg></svg>");
//   if (!json_write_done(&page, &error)) ...                                  page.text, page.bytes
//   json_writer_free(&page);
//
// A plot is an svg element of any size. Its labels stand at percentages of that size, outside its edges, with the size
// of the font; its curves have coordinates from 0 to SVG_UNITS, which are stretched to it, and lines that are not. So
// one text is good at every width, in a page and on paper. The colors are CSS variables (SVG_STYLE), light or dark.

#ifndef LLMTRAIN_SVG_H
#define LLMTRAIN_SVG_H

#include "../llmtrain/base/json.h"

// A text that grows. An allocation that fails is reported by json_write_done.
typedef JsonWriter Page;

#define SVG_FONT "font-family:system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',sans-serif"

#define SVG_STYLE                                                                                                     \
    ":root{--paper:#fff;--ink:#1c2127;--dim:#626b76;--grid:#e6e9ed;--frame:#c3c9d1;--c0:#2563ab;--c1:#d9601a;"        \
    "--c2:#2c8a57;--c3:#7c52c8;--c4:#c22f3d;--c5:#0b8693;--c6:#96700f;--c7:#6b7683}"                                  \
    "@media screen and (prefers-color-scheme:dark){"                                                                  \
    ":root{--paper:#13171c;--ink:#e4e8ec;--dim:#98a2ae;--grid:#262d35;--frame:#46505c;--c0:#6aa9ee;--c1:#f2935a;"     \
    "--c2:#63c48f;--c3:#b39aec;--c4:#f0757f;--c5:#54bfca;--c6:#d0ac4c;--c7:#9aa5b1}}.plot{overflow:visible}"          \
    ".plot text{font-size:12px;fill:var(--dim)}.y{text-anchor:end}.x{text-anchor:middle}"                             \
    ".plot line{stroke:var(--grid)}.plot path{vector-effect:non-scaling-stroke}"                                      \
    ".line{fill:none;stroke-width:1.6;stroke-linejoin:round}.band{stroke:none;opacity:.24}"                           \
    ".dot{fill:none;stroke-width:5;stroke-linecap:round}"

// ------------------------------------------------------------------------------------------------
// Text

__attribute__((format(printf, 2, 3))) static inline void page_put(Page* page, const char* format, ...) {
    char text[2048];
    va_list arguments;
    va_start(arguments, format);
    int bytes = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    json_put(page, text, min_size((size_t)bytes, sizeof text - 1));
}

// A text from outside, at most `bytes` bytes of it, for an element or an attribute: it stays text. What HTML and XML
// cannot hold, bytes that are not UTF-8 and control characters, becomes U+FFFD.
static inline void page_text(Page* page, const char* text, size_t bytes) {
    static const char special[] = "&<>\"'";
    static const char* const entities[] = {"&amp;", "&lt;", "&gt;", "&quot;", "&#39;"};
    const char* end = text + bytes;
    for (size_t n; text < end; text += max_size(n, 1)) {
        const char* found = *text ? strchr(special, *text) : NULL;
        n = utf8_bytes(text);
        bool control = ((unsigned char)*text < 0x20 && *text != '\n' && *text != '\t') || *text == 0x7F;
        control = control || (n == 2 && text[0] == '\xC2' && (unsigned char)text[1] < 0xA0);
        control = control || (n == 3 && memcmp(text, "\xEF\xBF", 2) == 0 && (unsigned char)text[2] > 0xBD);
        if (found) json_put(page, entities[found - special], strlen(entities[found - special]));
        else if (n == 0 || control) json_put(page, "\xEF\xBF\xBD", 3);
        else if (text + n > end) return;  // cut in the middle of a character
        else json_put(page, text, n);
    }
}

// A text from outside, between two of the page.
static inline void page_string(Page* page, const char* before, const char* text, const char* after) {
    page_put(page, "%s", before);
    page_text(page, text, strlen(text));
    page_put(page, "%s", after);
}

// A number for people: five digits, or all of a larger one, with commas between thousands.
static inline const char* number_text(char text[40], double value) {
    if (!isfinite(value)) return strcpy(text, "-");
    if (fabs(value) < 99999.5 || fabs(value) >= 1e15) return snprintf(text, 40, "%.5g", value), text;
    for (int i = snprintf(text, 40, "%.0f", value) - 3; i > (value < 0); i -= 3) {
        memmove(text + i + 1, text + i, strlen(text + i) + 1);
        text[i] = ',';
    }
    return text;
}

// A short one, for ticks: 25000 is 25k.
static inline const char* number_short(char text[40], double value) {
    static const char* const units[] = {"", "k", "M", "B", "T"};
    int unit = 0;
    for (; fabs(value) >= (unit ? 999.95 : 9999.5) && unit < 4; unit++) value /= 1000;
    snprintf(text, 40, "%.4g%s", value, units[unit]);
    return text;
}

// ------------------------------------------------------------------------------------------------
// Axes

enum { SVG_TICKS_MAX = 16, SVG_UNITS = 5000 };

typedef struct {
    double low, high;
    bool log;
} SvgScale;

// Where a value is: 0 at the low end, 1 at the high end.
static inline double svg_at(const SvgScale* s, double value) {
    if (s->log) return log(value / s->low) / log(s->high / s->low);
    return (value - s->low) / (s->high - s->low);
}

// Multiples of 1, 2 or 5 times a power of ten, at most `most` of them.
static inline int svg_ticks_even(double* ticks, const SvgScale* s, int most) {
    double span = (s->high - s->low) / most, power = pow(10, floor(log10(span))), step = power;
    if (step < span * (1 - 1e-9)) step = 2 * power;
    if (step < span * (1 - 1e-9)) step = 5 * power;
    if (step < span * (1 - 1e-9)) step = 10 * power;
    int count = 0;
    for (double k = ceil(s->low / step - 1e-9); k * step <= s->high + 1e-9 * step && count < SVG_TICKS_MAX; k++)
        ticks[count++] = k * step + 0.0;  // not -0
    return count;
}

// On a log scale powers of ten, with 2 and 5 between them if there are few; evenly spaced ones where there are none.
static inline int svg_ticks(double ticks[SVG_TICKS_MAX], const SvgScale* s, int most) {
    double decades = s->log ? log10(s->high / s->low) : 0;
    if (decades < 0.9) return svg_ticks_even(ticks, s, most);
    int count = 0, stride = (int)ceil(decades / most), first = (int)floor(log10(s->low));
    for (int power = first; power <= first + decades + 2; power += stride) {
        for (int i = 0; i < 3 && count < SVG_TICKS_MAX; i++) {
            double tick = pow(10, power) * (i == 0 ? 1 : i == 1 ? 2 : 5);
            if (i > 0 && 3 * decades > most + 2) break;
            if (tick >= s->low * (1 - 1e-9) && tick <= s->high * (1 + 1e-9)) ticks[count++] = tick;
        }
    }
    return count;
}

// Lines across the plot, and their numbers on its left.
static inline void svg_axis_y(Page* page, const SvgScale* s, int most) {
    double ticks[SVG_TICKS_MAX];
    char text[40];
    for (int i = 0, n = svg_ticks(ticks, s, most); i < n; i++) {
        double at = 100 * (1 - svg_at(s, ticks[i]));
        page_put(page, "<line x2=\"100%%\" y1=\"%.2f%%\" y2=\"%.2f%%\"/>", at, at);
        page_put(page, "<text class=\"y\" x=\"-7\" y=\"%.2f%%\" dy=\".33em\">%s</text>", at,
                 number_short(text, ticks[i]));
    }
}

// Numbers below the plot, the first with what they count. group: a class of them all, by which one of several axes is
// shown.
static inline void svg_axis_x(Page* page, const SvgScale* s, int most, const char* group, const char* name) {
    double ticks[SVG_TICKS_MAX];
    char text[40];
    page_put(page, "<g class=\"%s\">", group);
    for (int i = 0, n = svg_ticks(ticks, s, most); i < n; i++) {
        double at = 100 * svg_at(s, ticks[i]);
        page_put(page, "<text class=\"x\" x=\"%.2f%%\" y=\"100%%\" dy=\"17\">%s%s%s</text>", at,
                 number_short(text, ticks[i]), i ? "" : " ", i ? "" : name);
    }
    page_put(page, "</g>");
}

// ------------------------------------------------------------------------------------------------
// Curves: paths whose attributes but `d` are written before; x is 0 to 1, from the left

static inline void svg_curves_begin(Page* page) {
    page_put(page, "<svg width=\"100%%\" height=\"100%%\" viewBox=\"0 0 %d %d\" preserveAspectRatio=\"none\">",
             SVG_UNITS, SVG_UNITS);
}

// A coordinate, not far outside of the plot.
static inline int svg_units(double at) { return (int)lrint(SVG_UNITS * fmin(fmax(at, -1), 2)); }

static inline void svg_point(Page* page, const char* before, const SvgScale* s, double x, double value) {
    page_put(page, "%s%d %d", before, svg_units(x), svg_units(1 - svg_at(s, value)));
}

// A line through the values that are numbers; the others are gaps in it, or are passed over.
static inline void svg_line(Page* page, const SvgScale* s, const double* x, const double* values, size_t count,
                            bool over_gaps) {
    bool pen = false;
    page_put(page, " d=\"");
    for (size_t i = 0; i < count; i++) {
        bool there = isfinite(values[i]);
        if (there) svg_point(page, pen ? " " : "M", s, x[i], values[i]);
        bool alone = there && !pen && !over_gaps && (i + 1 == count || !isfinite(values[i + 1]));
        if (alone) page_put(page, "h5");  // a line of one point would not be seen
        pen = there || (over_gaps && pen);
    }
    page_put(page, "\"/>");
}

// The area between two lines.
static inline void svg_band(Page* page, const SvgScale* s, const double* x, const double* low, const double* high,
                            size_t count) {
    const char* before = " d=\"M";
    for (size_t i = 0; i < count; i++) {
        if (!isfinite(high[i])) continue;
        svg_point(page, before, s, x[i], high[i]);
        before = " ";
    }
    for (size_t i = count; i-- > 0;)
        if (isfinite(low[i])) svg_point(page, " ", s, x[i], low[i]);
    page_put(page, "Z\"/>");
}

// ------------------------------------------------------------------------------------------------
// A picture of colored cells, as a bitmap in the text: one rectangle in the file instead of one for each cell

// Bytes in base64 (RFC 4648).
static inline void page_base64(Page* page, const unsigned char* bytes, size_t count) {
    static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (size_t i = 0; i < count; i += 3) {
        uint32_t group = 0;
        char text[4] = {'=', '=', '=', '='};
        for (size_t k = 0; k < 3; k++) group = group << 8 | (i + k < count ? bytes[i + k] : 0);
        for (size_t k = 0; k <= min_size(count - i, 3); k++) text[k] = letters[group >> (18 - 6 * k) & 63];
        json_put(page, text, 4);
    }
}

// The rows of cells (height, width), from above, each byte a color (red, green, blue) of the palette, as a data URI: a
// BMP file with a BITMAPINFOHEADER, not compressed.
static inline void bitmap_uri(Page* page, const unsigned char* cells, size_t width, size_t height,
                              const unsigned char palette[256][3]) {
    enum { HEADER = 54, PALETTE = 1024 };
    size_t row = round_up(width, 4), bytes = HEADER + PALETTE + row * height;
    const uint32_t fields[] = {(uint32_t)bytes, 0, HEADER + PALETTE, 40, (uint32_t)width, (uint32_t)height,
                               8 << 16 | 1};  // 1 plane, 8 bits; the other fields are 0
    unsigned char* file = (unsigned char*)memory_allocate(bytes);
    page->failed |= file == NULL;
    if (file == NULL) return;
    memcpy(file, "BM", 2);
    for (size_t i = 0; i < sizeof fields; i++) file[2 + i] = (unsigned char)(fields[i / 4] >> i % 4 * 8);
    for (size_t i = 0; i < 768; i++) file[HEADER + i / 3 * 4 + 2 - i % 3] = palette[i / 3][i % 3];
    for (size_t y = 0; y < height; y++)  // the last row comes first
        memcpy(file + HEADER + PALETTE + row * y, cells + width * (height - 1 - y), width);
    page_put(page, "data:image/bmp;base64,");
    page_base64(page, file, bytes);
    free(file);
}

#endif  // LLMTRAIN_SVG_H
