// svg.h: charts as text: axes with ticks, lines, bands, dots, bars, a picture of colored cells; and escaping.
//
//   Page page = {0};
//   page_put(&page, "<svg class=\"plot\" height=\"190\">");
//   svg_axis_y(&page, &scale, 5);
//   svg_curves_begin(&page);
//   svg_line(&page, x, y, count, false, "class=\"line\" style=\"stroke:var(--c0)\"");
//   svg_curves_end(&page);
//   page_put(&page, "</svg>");
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
    "@media (prefers-color-scheme:dark){:root{--paper:#13171c;--ink:#e4e8ec;--dim:#98a2ae;--grid:#262d35;"            \
    "--frame:#46505c;--c0:#6aa9ee;--c1:#f2935a;--c2:#63c48f;--c3:#b39aec;--c4:#f0757f;--c5:#54bfca;--c6:#d0ac4c;"     \
    "--c7:#9aa5b1}}"                                                                                                  \
    ".plot{overflow:visible}.plot text{font-size:12px;fill:var(--dim)}.y{text-anchor:end}.x{text-anchor:middle}"      \
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

static inline void page_string(Page* page, const char* text) { page_text(page, text, strlen(text)); }

// A number for people: five digits, or all of a larger one, with commas between thousands.
static inline const char* number_text(char text[40], double value) {
    if (!isfinite(value)) return strcpy(text, "-");
    if (fabs(value) < 99999.5 || fabs(value) >= 1e15) return snprintf(text, 40, "%.5g", value), text;
    char digits[32];
    size_t n = (size_t)snprintf(digits, sizeof digits, "%.0f", fabs(value)), used = 0;
    if (value < 0) text[used++] = '-';
    for (size_t i = 0; i < n; i++) {
        if (i > 0 && (n - i) % 3 == 0) text[used++] = ',';
        text[used++] = digits[i];
    }
    text[used] = 0;
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
// Curves: x and y are 0 to 1, from the left and from below, as svg_at returns them

static inline void svg_curves_begin(Page* page) {
    page_put(page, "<svg width=\"100%%\" height=\"100%%\" viewBox=\"0 0 %d %d\" preserveAspectRatio=\"none\">",
             SVG_UNITS, SVG_UNITS);
}

static inline void svg_curves_end(Page* page) { page_put(page, "</svg>"); }

// A coordinate, not far outside of the plot.
static inline int svg_units(double at) { return (int)lrint(SVG_UNITS * fmin(fmax(at, -1), 2)); }

static inline void svg_point(Page* page, const char* before, double x, double y) {
    page_put(page, "%s%d %d", before, svg_units(x), svg_units(1 - y));
}

static inline void svg_path_begin(Page* page, const char* attributes) {
    json_put(page, "<path ", 6);
    json_put(page, attributes, strlen(attributes));
    json_put(page, " d=\"", 4);
}

// A line through the points whose y is a number; the others are gaps in it, or are passed over.
static inline void svg_line(Page* page, const double* x, const double* y, size_t count, bool over_gaps,
                            const char* attributes) {
    bool pen = false;
    svg_path_begin(page, attributes);
    for (size_t i = 0; i < count; i++) {
        bool there = isfinite(y[i]);
        if (there) svg_point(page, pen ? " " : "M", x[i], y[i]);
        bool alone = there && !pen && !over_gaps && (i + 1 == count || !isfinite(y[i + 1]));
        if (alone) page_put(page, "h5");  // a line of one point would not be seen
        pen = there || (over_gaps && pen);
    }
    page_put(page, "\"/>");
}

static inline void svg_dots(Page* page, const double* x, const double* y, size_t count, const char* attributes) {
    svg_path_begin(page, attributes);
    for (size_t i = 0; i < count; i++) {
        if (!isfinite(y[i])) continue;
        svg_point(page, "M", x[i], y[i]);
        page_put(page, "h0");
    }
    page_put(page, "\"/>");
}

// The area between two lines.
static inline void svg_band(Page* page, const double* x, const double* low, const double* high, size_t count,
                            const char* attributes) {
    const char* before = "M";
    svg_path_begin(page, attributes);
    for (size_t i = 0; i < count; i++) {
        if (!isfinite(high[i])) continue;
        svg_point(page, before, x[i], high[i]);
        before = " ";
    }
    for (size_t i = count; i-- > 0;)
        if (isfinite(low[i])) svg_point(page, " ", x[i], low[i]);
    page_put(page, "Z\"/>");
}

// ------------------------------------------------------------------------------------------------
// A picture of colored cells, as a PNG in the text: one rectangle in the file instead of one for each cell
//
// PNG (ISO/IEC 15948) with a palette; its data are stored, not compressed (RFC 1950, RFC 1951).

typedef struct {
    Page* page;
    uint32_t crc, group;  // CRC-32 of the chunk; up to three bytes, which base64 writes as four letters
    int bytes;            // of the group
} PngWriter;

static inline void png_letters(PngWriter* png, int letters) {
    static const char base64[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    char text[4] = {'=', '=', '=', '='};
    for (int i = 0; i < letters; i++) text[i] = base64[png->group >> (18 - 6 * i) & 63];
    json_put(png->page, text, 4);
    png->group = 0;
    png->bytes = 0;
}

static inline void png_byte(PngWriter* png, unsigned byte) {
    png->crc ^= byte;
    for (int i = 0; i < 8; i++) png->crc = png->crc >> 1 ^ (png->crc & 1 ? 0xEDB88320u : 0);
    png->group |= byte << (16 - 8 * png->bytes);
    if (++png->bytes == 3) png_letters(png, 4);
}

static inline void png_number(PngWriter* png, uint32_t number) {
    for (int i = 24; i >= 0; i -= 8) png_byte(png, number >> i & 255);
}

static inline void png_begin(PngWriter* png, uint32_t bytes, const char* name) {
    png_number(png, bytes);
    png->crc = 0xFFFFFFFFu;
    for (int i = 0; i < 4; i++) png_byte(png, (unsigned char)name[i]);
}

static inline void png_end(PngWriter* png) { png_number(png, ~png->crc); }

// The rows of cells (height, width), from above, each byte a color of the palette, as a data URI.
static inline void png_uri(Page* page, const unsigned char* cells, size_t width, size_t height,
                           const unsigned char palette[256][3]) {
    static const unsigned char signature[8] = {0x89, 'P', 'N', 'G', '\r', '\n', 0x1A, '\n'}, depth[5] = {8, 3, 0, 0, 0};
    PngWriter png = {page, 0, 0, 0};
    size_t row = width + 1, left = row * height;  // a row begins with a zero: no filter
    uint32_t a = 1, b = 0;                        // Adler-32
    page_put(page, "data:image/png;base64,");
    for (int i = 0; i < 8; i++) png_byte(&png, signature[i]);
    png_begin(&png, 13, "IHDR");
    png_number(&png, (uint32_t)width);
    png_number(&png, (uint32_t)height);
    for (int i = 0; i < 5; i++) png_byte(&png, depth[i]);
    png_end(&png);
    png_begin(&png, 768, "PLTE");
    for (int i = 0; i < 768; i++) png_byte(&png, palette[i / 3][i % 3]);
    png_end(&png);
    png_begin(&png, (uint32_t)(2 + 5 * ((left + 65534) / 65535) + left + 4), "IDAT");
    png_byte(&png, 0x78);
    png_byte(&png, 0x01);
    for (size_t i = 0; left > 0; i++, left--) {
        unsigned byte = i % row == 0 ? 0 : cells[i / row * width + i % row - 1];
        if (i % 65535 == 0) {  // a stored block
            unsigned bytes = (unsigned)min_size(left, 65535);
            png_byte(&png, left <= 65535);
            for (int k = 0; k < 4; k++) png_byte(&png, ((k < 2 ? bytes : ~bytes) >> (k % 2 * 8)) & 255);
        }
        png_byte(&png, byte);
        a = (a + byte) % 65521;
        b = (b + a) % 65521;
    }
    png_number(&png, b << 16 | a);
    png_end(&png);
    png_begin(&png, 0, "IEND");
    png_end(&png);
    if (png.bytes > 0) png_letters(&png, png.bytes + 1);
}

#endif  // LLMTRAIN_SVG_H
