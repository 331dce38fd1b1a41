// The operations of kernels/ops.py for x86 processors, as plain C functions over float32 activations.
//
// kernels/cpu_build.py compiles this file for AVX2 or for AVX-512, kernels/cpu.py checks shapes and calls
// it. Everything is written over `vec`, sixteen floats, so both builds compute the same numbers.
//
// Exactness: a row's result depends on that row alone. Every output of a matrix product is one chain of
// fused multiply-adds in the order of the inputs, every query visits its own pages in order, and sums over
// a row are made of sixteen partial sums in one fixed tree. How rows are tiled, and which thread computes
// what, changes nothing. Compiled without -ffast-math: the compiler may not reorder either.
//
// Letters as in kernels/ops.py: T tokens, S requests, Hq and Hkv heads of D elements. All indices are int64.

#include <immintrin.h>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu_threads.hpp"

#define INLINE static inline __attribute__((always_inline))

namespace {

using i64 = int64_t;
constexpr i64 kLanes = 16;    // floats of a vec, columns of a weight panel
constexpr i64 kPage = 16;     // tokens of a KV page
constexpr float kInfinity = __builtin_inff();

threads::Team& team()
{
    static threads::Team* const team = new threads::Team;  // for good: its threads may outlive what ends a process
    return *team;
}

// work(row) for every row, `part_rows` of them at a time shared between threads.
template <class Work> void for_rows(i64 num_rows, i64 part_rows, const Work& work)
{
    team().run((num_rows + part_rows - 1) / part_rows, [&](i64 part) {
        const i64 end = std::min(num_rows, (part + 1) * part_rows);
        for (i64 row = part * part_rows; row < end; row++) work(row);
    });
}

// Rows of `n` elements that are worth a part.
i64 rows_worth(i64 elements, i64 n) { return std::max<i64>(1, elements / std::max<i64>(1, n)); }

// ---------------------------------------------------------------------------------------------------------
// vec: sixteen floats, in one register of AVX-512 or in two of AVX2
// ---------------------------------------------------------------------------------------------------------

#ifdef __AVX512F__

struct vec { __m512 all; };

INLINE __mmask16 first(i64 n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : (__mmask16)((1u << n) - 1); }
INLINE vec splat(float x) { return {_mm512_set1_ps(x)}; }
INLINE vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
INLINE vec load(const float* p, i64 n) { return {_mm512_maskz_loadu_ps(first(n), p)}; }
INLINE void store(float* p, vec x) { _mm512_storeu_ps(p, x.all); }
INLINE void store(float* p, vec x, i64 n) { _mm512_mask_storeu_ps(p, first(n), x.all); }
INLINE vec fma(vec a, vec b, vec c) { return {_mm512_fmadd_ps(a.all, b.all, c.all)}; }
INLINE vec operator+(vec a, vec b) { return {_mm512_add_ps(a.all, b.all)}; }
INLINE vec operator-(vec a, vec b) { return {_mm512_sub_ps(a.all, b.all)}; }
INLINE vec operator*(vec a, vec b) { return {_mm512_mul_ps(a.all, b.all)}; }
INLINE vec operator/(vec a, vec b) { return {_mm512_div_ps(a.all, b.all)}; }
INLINE vec largest(vec a, vec b) { return {_mm512_max_ps(a.all, b.all)}; }     // b where one is no number
INLINE vec smallest(vec a, vec b) { return {_mm512_min_ps(a.all, b.all)}; }    // likewise
INLINE vec nearest(vec x) { return {_mm512_roundscale_ps(x.all, _MM_FROUND_TO_NEAREST_INT)}; }
INLINE vec times_two_to(vec x, vec n)  // x * 2^n for whole n, by the exponent's bits
{
    __m512i shifted = _mm512_slli_epi32(_mm512_cvtps_epi32(n.all), 23);
    return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x.all), shifted))};
}
INLINE vec keep(vec x, i64 begin, i64 end, float other)  // lanes begin .. end of x, the others `other`
{
    return {_mm512_mask_mov_ps(_mm512_set1_ps(other), first(end) & ~first(begin), x.all)};
}
INLINE __m256 low(vec x) { return _mm512_castps512_ps256(x.all); }
INLINE __m256 high(vec x) { return _mm512_extractf32x8_ps(x.all, 1); }
INLINE vec widen_bf16_even(const uint16_t* p)  // of 16 pairs the first
{
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))};
}
INLINE vec widen_bf16_odd(const uint16_t* p)  // of 16 pairs the second
{
    return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32((int)0xffff0000)))};
}
INLINE vec widen_fp16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
INLINE vec widen_int8(const int8_t* p)
{
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}

#else

struct vec { __m256 lo, hi; };

INLINE __m256i first8(i64 n)
{
    __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), lane);
}
INLINE vec splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE vec load(const float* p, i64 n)
{
    return {_mm256_maskload_ps(p, first8(n)), _mm256_maskload_ps(p + 8, first8(n - 8))};
}
INLINE void store(float* p, vec x)
{
    _mm256_storeu_ps(p, x.lo);
    _mm256_storeu_ps(p + 8, x.hi);
}
INLINE void store(float* p, vec x, i64 n)
{
    _mm256_maskstore_ps(p, first8(n), x.lo);
    _mm256_maskstore_ps(p + 8, first8(n - 8), x.hi);
}
INLINE vec fma(vec a, vec b, vec c)
{
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
INLINE vec operator+(vec a, vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
INLINE vec operator-(vec a, vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
INLINE vec operator*(vec a, vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
INLINE vec operator/(vec a, vec b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
INLINE vec largest(vec a, vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
INLINE vec smallest(vec a, vec b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
INLINE vec nearest(vec x)
{
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.lo, mode), _mm256_round_ps(x.hi, mode)};
}
INLINE __m256 times_two_to(__m256 x, __m256 n)
{
    __m256i shifted = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), shifted));
}
INLINE vec times_two_to(vec x, vec n) { return {times_two_to(x.lo, n.lo), times_two_to(x.hi, n.hi)}; }
INLINE vec keep(vec x, i64 begin, i64 end, float other)
{
    __m256 rest = _mm256_set1_ps(other);
    __m256i lo = _mm256_andnot_si256(first8(begin), first8(end));
    __m256i hi = _mm256_andnot_si256(first8(begin - 8), first8(end - 8));
    return {_mm256_blendv_ps(rest, x.lo, _mm256_castsi256_ps(lo)),
            _mm256_blendv_ps(rest, x.hi, _mm256_castsi256_ps(hi))};
}
INLINE __m256 low(vec x) { return x.lo; }
INLINE __m256 high(vec x) { return x.hi; }
INLINE __m256 even8(const uint16_t* p)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i*)p), 16));
}
INLINE __m256 odd8(const uint16_t* p)
{
    __m256i upper = _mm256_set1_epi32((int)0xffff0000);
    return _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256((const __m256i*)p), upper));
}
INLINE vec widen_bf16_even(const uint16_t* p) { return {even8(p), even8(p + 16)}; }
INLINE vec widen_bf16_odd(const uint16_t* p) { return {odd8(p), odd8(p + 16)}; }
INLINE __m256 half8(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
INLINE vec widen_fp16(const uint16_t* p) { return {half8(p), half8(p + 8)}; }
INLINE __m256 byte8(const int8_t* p)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
INLINE vec widen_int8(const int8_t* p) { return {byte8(p), byte8(p + 8)}; }

#endif

INLINE vec zero() { return splat(0.0f); }

INLINE float sum(vec x)
{
    __m256 eight = _mm256_add_ps(low(x), high(x));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

INLINE float maximum(vec x)
{
    __m256 eight = _mm256_max_ps(low(x), high(x));
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

// e^x = 2^n e^r with n = round(x / ln 2), so |r| <= ln(2) / 2, where Taylor's polynomial of degree 7 is exact
// to float32. ln 2 in two parts, the first short enough for n * part to be exact (Cody and Waite, 1980).
// Clamped to -86 .. 88: never zero, never infinite; what is not a number stays so.
INLINE vec exp(vec x)
{
    x = smallest(splat(88.0f), largest(splat(-86.0f), x));
    vec n = nearest(x * splat(1.44269504f));
    vec r = fma(n, splat(-0.693145751953125f), x);
    r = fma(n, splat(-1.42860682e-6f), r);
    vec p = splat(1.0f / 5040);
    p = fma(p, r, splat(1.0f / 720));
    p = fma(p, r, splat(1.0f / 120));
    p = fma(p, r, splat(1.0f / 24));
    p = fma(p, r, splat(1.0f / 6));
    p = fma(p, r, splat(0.5f));
    p = fma(p, r, splat(1.0f));
    p = fma(p, r, splat(1.0f));
    return times_two_to(p, n);
}

// tanh(x) = 1 - 2 / (e^2x + 1)
INLINE vec tanh(vec x) { return splat(1.0f) - splat(2.0f) / (exp(x + x) + splat(1.0f)); }

// ---------------------------------------------------------------------------------------------------------
// Weights: panels of 16 outputs, [N / 16][K][16], the last one filled up with zeros
// ---------------------------------------------------------------------------------------------------------

// kStep inputs lie together, [K / kStep][16][kStep]; `widen` gives the 16 outputs of one of them.

struct Fp32 {
    using element = float;
    static constexpr i64 kStep = 1;
    template <int> INLINE vec widen(const float* p) { return load(p); }
};

// Two inputs in one 32-bit word: each takes one instruction to widen, and nothing is lost.
struct Bf16 {
    using element = uint16_t;
    static constexpr i64 kStep = 2;
    template <int kInput> INLINE vec widen(const uint16_t* p)
    {
        return kInput == 0 ? widen_bf16_even(p) : widen_bf16_odd(p);
    }
};

struct Fp16 {
    using element = uint16_t;
    static constexpr i64 kStep = 1;
    template <int> INLINE vec widen(const uint16_t* p) { return widen_fp16(p); }
};

struct Int8 {
    using element = int8_t;
    static constexpr i64 kStep = 1;
    template <int> INLINE vec widen(const int8_t* p) { return widen_int8(p); }
};

template <class W> INLINE i64 panel_size(i64 num_inputs)
{
    return (num_inputs + W::kStep - 1) / W::kStep * W::kStep * kLanes;
}

// Where input k of a panel's first output is.
template <class W> INLINE i64 place(i64 k) { return k / W::kStep * kLanes * W::kStep + k % W::kStep; }

template <class W>
void pack(typename W::element* packed, const typename W::element* rows, i64 num_rows, i64 num_inputs)
{
    const i64 size = panel_size<W>(num_inputs);
    std::memset(packed, 0, (num_rows + kLanes - 1) / kLanes * size * sizeof(typename W::element));
    for (i64 row = 0; row < num_rows; row++) {
        typename W::element* panel = packed + row / kLanes * size;
        for (i64 k = 0; k < num_inputs; k++)
            panel[place<W>(k) + row % kLanes * W::kStep] = rows[row * num_inputs + k];
    }
}

INLINE float as_float(Fp32, float x) { return x; }
INLINE float as_float(Bf16, uint16_t x)
{
    uint32_t bits = (uint32_t)x << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
INLINE float as_float(Fp16, uint16_t x) { return _cvtsh_ss(x); }
INLINE float as_float(Int8, int8_t x) { return x; }

// Row `ids[t]` of the matrix, back from its panel.
template <class W>
void embed(float* out, const i64* ids, i64 num_tokens, const typename W::element* weight, const float* scales,
           i64 num_inputs)
{
    const i64 size = panel_size<W>(num_inputs);
    for_rows(num_tokens, 4, [&](i64 t) {
        const typename W::element* panel = weight + ids[t] / kLanes * size + ids[t] % kLanes * W::kStep;
        const float scale = scales ? scales[ids[t]] : 1.0f;
        for (i64 k = 0; k < num_inputs; k++) out[t * num_inputs + k] = as_float(W{}, panel[place<W>(k)]) * scale;
    });
}

// ---------------------------------------------------------------------------------------------------------
// Linear: out[t][n] = sum over k of x[t][k] w[n][k], times scale[n], plus bias[n]
// ---------------------------------------------------------------------------------------------------------

// Tiles of kRows rows and kPanels panels stay in registers: 16 of 8 floats, or 32 of 16. Eight sums keep
// both multipliers busy, so few rows take more panels. A pair of Bf16
// takes two registers more, and a single sum that finds no place costs more than a row less.
#ifdef __AVX512F__
template <class W> constexpr int kRowsMax = 12;
constexpr int panels_of(int rows) { return rows <= 2 ? 4 : 2; }
#else
template <class W> constexpr int kRowsMax = 6;
template <> constexpr int kRowsMax<Bf16> = 5;
constexpr int panels_of(int rows) { return rows <= 2 ? 2 : 1; }
#endif
constexpr i64 kUnit = 4;              // panels a thread takes at a time, for as many rows
constexpr i64 kUnitProducts = 1 << 24;  // as take no more multiplications than that: a fraction of a millisecond
// How far ahead of the multiplications weights are asked for. The processor's own guess stops at the end of
// a page of memory, and a tile of many rows is slow enough for it to fall behind.
template <class W> constexpr i64 kAheadBytes = sizeof(typename W::element) == 1 ? 1024 : 2048;

struct Linear {
    const float* x;
    const void* weight;
    const float *scales, *bias;  // or null
    float* out;
    i64 num_rows, num_inputs, num_outputs;
};

template <class W, int kInput, int kRows, int kPanels>
INLINE void multiply_add(const float* x, i64 num_inputs, const typename W::element* w, i64 size, i64 k,
                         vec (&sums)[kRows][kPanels])
{
    vec columns[kPanels];
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; p++) {
        const typename W::element* column = w + p * size + k * kLanes;
        if constexpr (kInput == 0) _mm_prefetch((const char*)column + kAheadBytes<W>, _MM_HINT_T0);
        columns[p] = W::template widen<kInput>(column);
    }
#pragma GCC unroll 12
    for (int r = 0; r < kRows; r++) {
        const vec one = splat(x[r * num_inputs + k + kInput]);
#pragma GCC unroll 4
        for (int p = 0; p < kPanels; p++) sums[r][p] = fma(one, columns[p], sums[r][p]);
    }
}

template <class W, int kRows, int kPanels> void tile(const Linear& l, i64 row, i64 panel)
{
    const i64 K = l.num_inputs, size = panel_size<W>(K);
    const float* x = l.x + row * K;
    const auto* w = (const typename W::element*)l.weight + panel * size;
    vec sums[kRows][kPanels];
#pragma GCC unroll 12
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < kPanels; p++) sums[r][p] = zero();
    i64 k = 0;
    for (; k + W::kStep <= K; k += W::kStep) {
        multiply_add<W, 0>(x, K, w, size, k, sums);
        if constexpr (W::kStep == 2) multiply_add<W, 1>(x, K, w, size, k, sums);
    }
    if (k < K) multiply_add<W, 0>(x, K, w, size, k, sums);
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; p++) {
        const i64 column = (panel + p) * kLanes, n = std::min(kLanes, l.num_outputs - column);
        const vec scale = l.scales ? load(l.scales + column, n) : splat(1.0f);
        const vec bias = l.bias ? load(l.bias + column, n) : zero();
#pragma GCC unroll 12
        for (int r = 0; r < kRows; r++) {
            float* out = l.out + (row + r) * l.num_outputs + column;
            if (n == kLanes) store(out, fma(sums[r][p], scale, bias));
            else store(out, fma(sums[r][p], scale, bias), n);
        }
    }
}

// kRows rows at a time while there are as many, then the next smaller tile.
template <class W, int kRows> INLINE void rows_of(const Linear& l, i64& row, i64 end_row, i64 panel, i64 end)
{
    constexpr int kPanels = panels_of(kRows);
    for (; row + kRows <= end_row; row += kRows) {
        i64 p = panel;
        for (; p + kPanels <= end; p += kPanels) tile<W, kRows, kPanels>(l, row, p);
        for (; p < end; p++) tile<W, kRows, 1>(l, row, p);
    }
}

template <class W> void linear(const Linear& l)
{
    constexpr i64 kTile = kRowsMax<W>;
    const i64 num_panels = (l.num_outputs + kLanes - 1) / kLanes;
    const i64 num_units = (num_panels + kUnit - 1) / kUnit;
    const i64 num_tiles = kUnitProducts / (kUnit * kLanes * std::max<i64>(1, l.num_inputs)) / kTile;
    const i64 unit_rows = std::max<i64>(4, num_tiles) * kTile;
    const i64 num_blocks = (l.num_rows + unit_rows - 1) / unit_rows;
    team().run(num_blocks * num_units, [&](i64 part) {
        const i64 panel = part % num_units * kUnit, end = std::min(panel + kUnit, num_panels);
        i64 row = part / num_units * unit_rows;
        const i64 end_row = std::min(row + unit_rows, l.num_rows);
        rows_of<W, kTile>(l, row, end_row, panel, end);
        if constexpr (kTile > 8) rows_of<W, 8>(l, row, end_row, panel, end);
        rows_of<W, 4>(l, row, end_row, panel, end);
        rows_of<W, 2>(l, row, end_row, panel, end);
        rows_of<W, 1>(l, row, end_row, panel, end);
    });
}

// ---------------------------------------------------------------------------------------------------------
// RMS norm: x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, 2019)
// ---------------------------------------------------------------------------------------------------------

INLINE void norm_row(float* out, const float* x, const float* weight, i64 n, float eps)
{
    vec squares = zero();
    i64 i = 0;
    for (; i + kLanes <= n; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
    if (i < n) squares = fma(load(x + i, n - i), load(x + i, n - i), squares);
    const vec scale = splat(1.0f / std::sqrt(sum(squares) / (float)n + eps));
    for (i = 0; i + kLanes <= n; i += kLanes) store(out + i, load(x + i) * scale * load(weight + i));
    if (i < n) store(out + i, load(x + i, n - i) * scale * load(weight + i, n - i), n - i);
}

INLINE void add_row(float* total, const float* x, i64 n)
{
    i64 i = 0;
    for (; i + kLanes <= n; i += kLanes) store(total + i, load(total + i) + load(x + i));
    if (i < n) store(total + i, load(total + i, n - i) + load(x + i, n - i), n - i);
}

// ---------------------------------------------------------------------------------------------------------
// Gated activations: act(gate) * up, gate and up side by side (Shazeer, 2020)
// ---------------------------------------------------------------------------------------------------------

struct Silu {  // x / (1 + e^-x)
    INLINE vec apply(vec x) { return x / (splat(1.0f) + exp(zero() - x)); }
};

struct GeluTanh {  // x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2 (Hendrycks and Gimpel, 2016)
    INLINE vec apply(vec x)
    {
        vec inner = x * fma(splat(0.044715f), x * x, splat(1.0f)) * splat(0.7978845608f);
        return splat(0.5f) * x * (splat(1.0f) + tanh(inner));
    }
};

struct GeluErf {  // x erfc(-x / sqrt(2)) / 2, lane by lane: exact, and rare enough not to need more
    INLINE vec apply(vec x)
    {
        float lanes[kLanes];
        store(lanes, x);
        for (float& lane : lanes) lane = 0.5f * lane * std::erfc(lane * -0.70710678f);
        return load(lanes);
    }
};

template <class Activation> void activate(float* out, const float* gate_up, i64 num_rows, i64 n)
{
    for_rows(num_rows, rows_worth(4096, n), [&](i64 row) {
        const float *gate = gate_up + row * 2 * n, *up = gate + n;
        float* to = out + row * n;
        i64 i = 0;
        for (; i + kLanes <= n; i += kLanes) store(to + i, Activation::apply(load(gate + i)) * load(up + i));
        if (i < n) store(to + i, Activation::apply(load(gate + i, n - i)) * load(up + i, n - i), n - i);
    });
}

// ---------------------------------------------------------------------------------------------------------
// Mixture of experts: which ones compute a row, the likeliest first, and their shares of the softmax
// ---------------------------------------------------------------------------------------------------------

void route_row(i64* ids, float* shares, const float* scores, i64 num_experts, i64 num_chosen, bool normalised)
{
    const float most = *std::max_element(scores, scores + num_experts);
    double sum = 0;
    for (i64 e = 0; e < num_experts; e++) sum += std::exp((double)scores[e] - most);
    std::vector<i64> order(num_experts);
    for (i64 e = 0; e < num_experts; e++) order[e] = e;
    // What is no number comes last, or the order would be none.
    auto key = [scores](i64 e) { return std::isnan(scores[e]) ? -kInfinity : scores[e]; };
    std::partial_sort(order.begin(), order.begin() + num_chosen, order.end(),
                      [&key](i64 a, i64 b) { return key(a) != key(b) ? key(a) > key(b) : a < b; });
    if (normalised) {
        sum = 0;
        for (i64 i = 0; i < num_chosen; i++) sum += std::exp((double)scores[order[i]] - most);
    }
    for (i64 i = 0; i < num_chosen; i++) {
        ids[i] = order[i];
        shares[i] = (float)(std::exp((double)scores[order[i]] - most) / sum);
    }
}

// ---------------------------------------------------------------------------------------------------------
// Rotary positions and KV write: K pages [page][Hkv][D][16], V pages [page][Hkv][16][D]
// ---------------------------------------------------------------------------------------------------------

// (a, b) half a head apart turn to (a c - b s, b c + a s) (Su et al., 2021); lane by lane at distance `step`.
INLINE void rotate(float* out, i64 step, const float* x, const float* cos, const float* sin, i64 half)
{
    for (i64 i = 0; i < half; i++) {
        const float a = x[i], b = x[half + i];
        out[i * step] = __builtin_fmaf(a, cos[i], -(b * sin[i]));
        out[(half + i) * step] = __builtin_fmaf(b, cos[i], a * sin[i]);
    }
}

// ---------------------------------------------------------------------------------------------------------
// Paged attention (Kwon et al., 2023), each query page by page with the running softmax of Milakov and
// Gimelshein, "Online normalizer calculation for softmax", 2018
// ---------------------------------------------------------------------------------------------------------

struct Attention {
    const float *q, *k, *v;
    float* out;
    const i64 *tables, *query_start, *context_lens;
    i64 num_requests, table_width, pages_per_block, q_stride, num_q_heads, num_kv_heads, head_dim;
    i64 window;  // 0 = none
    float scale, softcap;  // softcap 0 = none
};

#ifdef __AVX512F__
constexpr i64 kQueriesMax = 8;
#else
constexpr i64 kQueriesMax = 3;
#endif
constexpr i64 kHeadMax = 512;

// One (query, query head) of a tile: which of its request's tokens it sees, and what it has seen so far.
struct Query {
    i64 begin, end;      // tokens it sees
    float largest;       // of the scores so far
    vec weights;         // sum of the weights so far, by lane
    float* out;
};

// Scores of 16 tokens, [D][16], for kQueries queries that share the page. Two chains, over even and odd
// elements, because one would wait for itself. The page after this one is asked for meanwhile: the processor
// can't guess where it is.
template <int kQueries>
INLINE void scores_of(const float* page, const float* next, const float* q, i64 head_dim,
                      vec (&scores)[kQueriesMax])
{
    vec even[kQueries], odd[kQueries];
#pragma GCC unroll 8
    for (int i = 0; i < kQueries; i++) even[i] = odd[i] = zero();
    i64 d = 0;
    for (; d + 2 <= head_dim; d += 2) {
        const vec first = load(page + d * kPage), second = load(page + (d + 1) * kPage);
        _mm_prefetch((const char*)(next + d * kPage), _MM_HINT_T0);
        _mm_prefetch((const char*)(next + (d + 1) * kPage), _MM_HINT_T0);
#pragma GCC unroll 8
        for (int i = 0; i < kQueries; i++) {
            even[i] = fma(splat(q[i * kHeadMax + d]), first, even[i]);
            odd[i] = fma(splat(q[i * kHeadMax + d + 1]), second, odd[i]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kQueries; i++) scores[i] = even[i] + odd[i];
}

// sums[i] += weights[i][t] * v[t] for the tokens begin .. end of a page, in order.
template <int kQueries>
INLINE void mix(const float* page, const float* next, i64 head_dim, i64 begin, i64 end, const float* weights, float* sums)
{
    for (i64 d = 0; d < head_dim; d += kLanes) {
        const i64 n = head_dim - d;
        vec sum[kQueries];
#pragma GCC unroll 8
        for (int i = 0; i < kQueries; i++) sum[i] = load(sums + i * kHeadMax + d);
        for (i64 t = begin; t < end; t++) {
            const float* p = page + t * head_dim + d;
            _mm_prefetch((const char*)(next + t * head_dim + d), _MM_HINT_T0);
            const vec value = n >= kLanes ? load(p) : load(p, n);
#pragma GCC unroll 8
            for (int i = 0; i < kQueries; i++) sum[i] = fma(splat(weights[i * kPage + t]), value, sum[i]);
        }
#pragma GCC unroll 8
        for (int i = 0; i < kQueries; i++) store(sums + i * kHeadMax + d, sum[i]);
    }
}

// Queries begin .. begin + kQueries of request s, counted over its tokens and the heads of one group.
template <int kQueries> void attend(const Attention& a, i64 s, i64 kv_head, i64 begin)
{
    const i64 D = a.head_dim, group = a.num_q_heads / a.num_kv_heads;
    alignas(64) float q[kQueries * kHeadMax], sums[kQueries * kHeadMax], weights[kQueries * kPage];
    Query queries[kQueries];
    const i64 before = a.context_lens[s] - (a.query_start[s + 1] - a.query_start[s]);
    i64 first_page = INT64_MAX, last_page = 0;
    for (int i = 0; i < kQueries; i++) {
        const i64 offset = (begin + i) / group, head = kv_head * group + (begin + i) % group;
        const i64 token = a.query_start[s] + offset, end = before + offset + 1;
        queries[i] = {a.window > 0 ? std::max<i64>(0, end - a.window) : 0, end, -kInfinity, zero(),
                      a.out + (token * a.num_q_heads + head) * D};
        first_page = std::min(first_page, queries[i].begin / kPage);
        last_page = std::max(last_page, (end - 1) / kPage);
        for (i64 d = 0; d < D; d++) q[i * kHeadMax + d] = a.q[token * a.q_stride + head * D + d] * a.scale;
        std::fill_n(sums + i * kHeadMax, (D + kLanes - 1) / kLanes * kLanes, 0.0f);
    }
    auto place = [&](i64 page) {
        const i64 block = a.tables[s * a.table_width + page / a.pages_per_block];
        return ((block * a.pages_per_block + page % a.pages_per_block) * a.num_kv_heads + kv_head) * D * kPage;
    };
    i64 at = place(first_page), next = at;
    for (i64 page = first_page; page <= last_page; page++, at = next) {
        if (page < last_page) next = place(page + 1);
        vec scores[kQueriesMax];
        scores_of<kQueries>(a.k + at, a.k + next, q, D, scores);
        bool all_see_all = true;
        for (int i = 0; i < kQueries; i++) {
            Query& query = queries[i];
            const i64 from = query.begin - page * kPage, to = query.end - page * kPage;
            const bool sees_all = from <= 0 && to >= kPage;
            all_see_all &= sees_all;
            if (from >= kPage || to <= 0) continue;
            vec score = scores[i];
            if (a.softcap > 0) score = splat(a.softcap) * tanh(score / splat(a.softcap));
            const vec seen = sees_all ? score : keep(score, from, to, -kInfinity);
            const float largest = std::max(query.largest, maximum(seen));
            vec weight = exp(score - splat(largest));
            if (!sees_all) weight = keep(weight, from, to, 0.0f);
            if (largest > query.largest) {  // else the factor is one
                const vec factor = exp(splat(query.largest - largest));
                float* sum = sums + i * kHeadMax;
                query.weights = query.weights * factor;
                for (i64 d = 0; d < D; d += kLanes) store(sum + d, load(sum + d) * factor);
                query.largest = largest;
            }
            query.weights = query.weights + weight;
            store(weights + i * kPage, weight);
        }
        const float *values = a.v + at, *next_values = a.v + next;
        if (all_see_all) {
            mix<kQueries>(values, next_values, D, 0, kPage, weights, sums);
            continue;
        }
        for (int i = 0; i < kQueries; i++) {
            const i64 from = std::max<i64>(0, queries[i].begin - page * kPage);
            const i64 to = std::min(kPage, queries[i].end - page * kPage);
            mix<1>(values, next_values, D, from, to, weights + i * kPage, sums + i * kHeadMax);
        }
    }
    for (int i = 0; i < kQueries; i++) {
        const vec scale = splat(1.0f / sum(queries[i].weights));
        const float* mixed = sums + i * kHeadMax;
        for (i64 d = 0; d < D; d += kLanes) store(queries[i].out + d, load(mixed + d) * scale, D - d);
    }
}

template <int kQueries = (int)kQueriesMax>
INLINE void attend_any(const Attention& a, i64 s, i64 kv_head, i64 begin, i64 count)
{
    if (count == kQueries) attend<kQueries>(a, s, kv_head, begin);
    else if constexpr (kQueries > 1) attend_any<kQueries - 1>(a, s, kv_head, begin, count);
}

void attention(const Attention& a)
{
    const i64 group = a.num_q_heads / a.num_kv_heads;
    std::vector<i64> first_item(a.num_requests + 1, 0);  // items: (request, KV head, tile of queries)
    for (i64 s = 0; s < a.num_requests; s++) {
        const i64 num_queries = (a.query_start[s + 1] - a.query_start[s]) * group;
        first_item[s + 1] = first_item[s] + (num_queries + kQueriesMax - 1) / kQueriesMax * a.num_kv_heads;
    }
    const i64 num_items = first_item.back();
    team().run(num_items, [&](i64 item) {
        const i64 s = std::upper_bound(first_item.begin(), first_item.end(), item) - first_item.begin() - 1;
        const i64 num_queries = (a.query_start[s + 1] - a.query_start[s]) * group;
        const i64 kv_head = (item - first_item[s]) % a.num_kv_heads;
        const i64 begin = (item - first_item[s]) / a.num_kv_heads * kQueriesMax;
        attend_any(a, s, kv_head, begin, std::min(kQueriesMax, num_queries - begin));
    });
}

// ---------------------------------------------------------------------------------------------------------
// Logits
// ---------------------------------------------------------------------------------------------------------

INLINE float row_maximum(const float* x, i64 n)
{
    vec most = splat(-kInfinity);
    i64 i = 0;
    for (; i + kLanes <= n; i += kLanes) most = largest(load(x + i), most);
    if (i < n) most = largest(keep(load(x + i, n - i), 0, n - i, -kInfinity), most);
    return maximum(most);
}

INLINE bool all_finite(const float* x, i64 n)
{
    vec zeros = zero();  // 0 times what is infinite or no number is no number
    i64 i = 0;
    for (; i + kLanes <= n; i += kLanes) zeros = fma(load(x + i), zero(), zeros);
    if (i < n) zeros = fma(load(x + i, n - i), zero(), zeros);
    return sum(zeros) == 0.0f;
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------
// What kernels/cpu.py calls
// ---------------------------------------------------------------------------------------------------------

enum WeightType : i64 { kFp32, kBf16, kFp16, kInt8 };  // in the order of kernels/cpu.py

#define FOR_WEIGHT_TYPE(type, call)                  \
    switch (type) {                                  \
        case kFp32: { using W = Fp32; call; break; } \
        case kBf16: { using W = Bf16; call; break; } \
        case kFp16: { using W = Fp16; call; break; } \
        case kInt8: { using W = Int8; call; break; } \
    }

// As in kernels/cpu.py.

struct Projection {
    const void* weight;
    const float *scales, *bias;  // or null
    i64 type, num_inputs, num_outputs;
};

struct Layer {
    const float *attention_norm, *mlp_norm;
    Projection qkv, attention_out, gate_up, down;
    float *k_cache, *v_cache;
};

struct Stack {
    const Layer* layers;
    const float* rope;
    i64 num_layers, num_q_heads, num_kv_heads, head_dim, num_positions, num_blocks, pages_per_block;
    float norm_eps, scale;
};

// Whether a step names only positions, slots and blocks that exist: nothing else stands between a mistake in
// its making and foreign memory.
static bool is_sound(const Stack& stack, const i64* positions, const i64* slots, const i64* tables,
                     const i64* query_start, const i64* context_lens, i64 T, i64 num_requests, i64 table_width)
{
    auto within = [](i64 value, i64 end) { return value >= 0 && value < end; };
    const i64 block_size = stack.pages_per_block * kPage;
    bool sound = query_start[0] == 0 && query_start[num_requests] == T;
    for (i64 t = 0; t < T; t++)
        sound &= within(positions[t], stack.num_positions) && within(slots[t], stack.num_blocks * block_size);
    for (i64 s = 0; s < num_requests; s++) {
        const i64 num_tokens = query_start[s + 1] - query_start[s];
        const i64 num_blocks = (context_lens[s] + block_size - 1) / block_size;
        sound &= num_tokens > 0 && context_lens[s] >= num_tokens && num_blocks <= table_width;
        const i64* table = tables + s * table_width;
        for (i64 b = 0; sound && b < num_blocks; b++) sound = within(table[b], stack.num_blocks);
    }
    return sound;
}

extern "C" {

void vorrang_set_num_threads(i64 count) { team().set_size((int)std::min<i64>(count, INT16_MAX)); }

// Threads of the last operation that could be shared: as many as were set, or fewer where more would wait for
// somebody else's work.
i64 vorrang_num_threads() { return team().number(); }

i64 vorrang_panel_bytes(i64 type, i64 num_inputs)
{
    FOR_WEIGHT_TYPE(type, return panel_size<W>(num_inputs) * (i64)sizeof(W::element));
    return 0;
}

void vorrang_pack(i64 type, void* packed, const void* rows, i64 num_rows, i64 num_inputs)
{
    FOR_WEIGHT_TYPE(type, pack<W>((W::element*)packed, (const W::element*)rows, num_rows, num_inputs));
}

void vorrang_embed(i64 type, float* out, const i64* ids, i64 num_tokens, const void* weight,
                   const float* scales, i64 num_inputs)
{
    FOR_WEIGHT_TYPE(type, embed<W>(out, ids, num_tokens, (const W::element*)weight, scales, num_inputs));
}

void vorrang_linear(i64 type, float* out, const float* x, const void* weight, const float* scales,
                    const float* bias, i64 num_rows, i64 num_inputs, i64 num_outputs)
{
    const Linear l{x, weight, scales, bias, out, num_rows, num_inputs, num_outputs};
    FOR_WEIGHT_TYPE(type, linear<W>(l));
}

void vorrang_rms_norm(float* out, const float* x, const float* weight, i64 num_rows, i64 n, float eps)
{
    for_rows(num_rows, rows_worth(16384, n),
             [&](i64 row) { norm_row(out + row * n, x + row * n, weight, n, eps); });
}

void vorrang_add_rms_norm(float* out, const float* x, float* residual, const float* weight, i64 num_rows, i64 n,
                          float eps)
{
    for_rows(num_rows, rows_worth(16384, n), [&](i64 row) {
        add_row(residual + row * n, x + row * n, n);
        norm_row(out + row * n, residual + row * n, weight, n, eps);
    });
}

void vorrang_silu_mul(float* out, const float* gate_up, i64 num_rows, i64 n)
{
    activate<Silu>(out, gate_up, num_rows, n);
}

void vorrang_gelu_tanh_mul(float* out, const float* gate_up, i64 num_rows, i64 n)
{
    activate<GeluTanh>(out, gate_up, num_rows, n);
}

void vorrang_gelu_mul(float* out, const float* gate_up, i64 num_rows, i64 n)
{
    activate<GeluErf>(out, gate_up, num_rows, n);
}

// cap tanh(x / cap), in place
void vorrang_softcap(float* logits, i64 num_rows, i64 n, float cap)
{
    for_rows(num_rows, rows_worth(8192, n), [&](i64 row) {
        float* x = logits + row * n;
        i64 i = 0;
        for (; i + kLanes <= n; i += kLanes) store(x + i, splat(cap) * tanh(load(x + i) / splat(cap)));
        if (i < n) store(x + i, splat(cap) * tanh(load(x + i, n - i) / splat(cap)), n - i);
    });
}

void vorrang_route(i64* ids, float* shares, const float* scores, i64 num_rows, i64 num_experts, i64 num_chosen,
                   i64 normalised)
{
    for_rows(num_rows, 8, [&](i64 row) {
        route_row(ids + row * num_chosen, shares + row * num_chosen, scores + row * num_experts, num_experts,
                  num_chosen, normalised != 0);
    });
}

void vorrang_rotary_write_kv(float* q_out, const float* qkv, const float* rope, const i64* positions,
                             const i64* slots, float* k_cache, float* v_cache, i64 num_tokens, i64 num_q_heads,
                             i64 num_kv_heads, i64 head_dim)
{
    const i64 half = head_dim / 2, width = (num_q_heads + 2 * num_kv_heads) * head_dim;
    for_rows(num_tokens, 8, [&](i64 t) {
        const float *cos = rope + positions[t] * head_dim, *sin = cos + half, *x = qkv + t * width;
        for (i64 h = 0; h < num_q_heads; h++, x += head_dim)
            rotate(q_out + (t * num_q_heads + h) * head_dim, 1, x, cos, sin, half);
        const i64 page = slots[t] / kPage, lane = slots[t] % kPage;
        for (i64 h = 0; h < num_kv_heads; h++, x += head_dim)
            rotate(k_cache + (page * num_kv_heads + h) * head_dim * kPage + lane, kPage, x, cos, sin, half);
        for (i64 h = 0; h < num_kv_heads; h++, x += head_dim)
            std::copy_n(x, head_dim, v_cache + ((page * num_kv_heads + h) * kPage + lane) * head_dim);
    });
}

void vorrang_paged_attention(float* out, const float* q, const float* k_cache, const float* v_cache,
                             const i64* tables, const i64* query_start, const i64* context_lens,
                             i64 num_requests, i64 table_width, i64 pages_per_block, i64 q_stride,
                             i64 num_q_heads, i64 num_kv_heads, i64 head_dim, i64 window, float scale,
                             float softcap)
{
    attention({q, k_cache, v_cache, out, tables, query_start, context_lens, num_requests, table_width,
               pages_per_block, q_stride, num_q_heads, num_kv_heads, head_dim, window, scale, softcap});
}

// All layers of a decoder. `hidden` is the residual stream, [T, hidden], in and out; `buffer` has room
// for T rows of all that is taken from it below. Returns 0, having done nothing, where the step is not sound.
i64 vorrang_layers(const Stack* stack, float* hidden, float* buffer, const i64* positions, const i64* slots,
                    const i64* tables, const i64* query_start, const i64* context_lens, i64 T, i64 num_requests,
                    i64 table_width)
{
    if (!is_sound(*stack, positions, slots, tables, query_start, context_lens, T, num_requests, table_width))
        return 0;
    const i64 Hq = stack->num_q_heads, Hkv = stack->num_kv_heads, D = stack->head_dim;
    const i64 size = stack->layers[0].qkv.num_inputs;
    auto project = [T](const Projection& p, float* out, const float* x) {
        vorrang_linear(p.type, out, x, p.weight, p.scales, p.bias, T, p.num_inputs, p.num_outputs);
    };
    auto take = [&buffer, T](i64 width) { float* part = buffer; buffer += T * width; return part; };
    float *normed = take(size), *branch = take(size), *qkv = take((Hq + 2 * Hkv) * D);
    float *q = take(Hq * D), *mixed = take(Hq * D);
    float* gate_up = take(stack->layers[0].gate_up.num_outputs);
    float* product = take(stack->layers[0].down.num_inputs);
    for (i64 i = 0; i < stack->num_layers; i++) {
        const Layer& layer = stack->layers[i];
        if (i == 0) vorrang_rms_norm(normed, hidden, layer.attention_norm, T, size, stack->norm_eps);
        else vorrang_add_rms_norm(normed, branch, hidden, layer.attention_norm, T, size, stack->norm_eps);
        project(layer.qkv, qkv, normed);
        vorrang_rotary_write_kv(q, qkv, stack->rope, positions, slots, layer.k_cache, layer.v_cache, T, Hq, Hkv,
                                D);
        attention({q, layer.k_cache, layer.v_cache, mixed, tables, query_start, context_lens, num_requests,
                   table_width, stack->pages_per_block, Hq * D, Hq, Hkv, D, 0, stack->scale, 0.0f});
        project(layer.attention_out, branch, mixed);
        vorrang_add_rms_norm(normed, branch, hidden, layer.mlp_norm, T, size, stack->norm_eps);
        project(layer.gate_up, gate_up, normed);
        vorrang_silu_mul(product, gate_up, T, layer.down.num_inputs);
        project(layer.down, branch, product);
    }
    for (i64 row = 0; row < T; row++) add_row(hidden + row * size, branch + row * size, size);
    return 1;
}

// The likeliest id, the lowest on ties, and whether every logit is finite.
void vorrang_argmax(i64* ids, uint8_t* finite, const float* logits, i64 num_rows, i64 vocab)
{
    for_rows(num_rows, rows_worth(8192, vocab), [&](i64 row) {
        const float* x = logits + row * vocab;
        const float most = row_maximum(x, vocab);
        finite[row] = all_finite(x, vocab);
        i64 id = std::find(x, x + vocab, most) - x;
        ids[row] = id < vocab ? id : 0;
    });
}

// m + log(sum(e^(x - m))) with m the maximum
void vorrang_log_sum_exp(float* out, const float* logits, i64 num_rows, i64 vocab)
{
    for_rows(num_rows, rows_worth(8192, vocab), [&](i64 row) {
        const float* x = logits + row * vocab;
        const float most = row_maximum(x, vocab);
        vec sums = zero();
        i64 i = 0;
        for (; i + kLanes <= vocab; i += kLanes) sums = sums + exp(load(x + i) - splat(most));
        if (i < vocab) sums = sums + keep(exp(load(x + i, vocab - i) - splat(most)), 0, vocab - i, 0.0f);
        out[row] = most + std::log(sum(sums));
    });
}

}  // extern "C"
