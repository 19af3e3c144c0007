// How often each histogram code (sign, exponent, five mantissa bits of the float32) occurs in many
// tensors. A block counts one chunk of one tensor in shared memory, then adds to the tensor's table.
// VALUE is 0 for bfloat16, 1 for float16, 2 for float32. No headers, so that any NVRTC compiles it.

constexpr int codes = 16384;
constexpr int unroll = UNROLL;

__device__ __forceinline__ void count(unsigned *table, unsigned word) {
#if VALUE == 2
    atomicAdd(table + (word >> 18), 1u);
#elif VALUE == 0
    atomicAdd(table + ((word & 0xffffu) >> 2), 1u);
    atomicAdd(table + (word >> 18), 1u);
#else
    float low, high;
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
        : "=f"(low), "=f"(high) : "r"(word));
    atomicAdd(table + (__float_as_uint(low) >> 18), 1u);
    atomicAdd(table + (__float_as_uint(high) >> 18), 1u);
#endif
}

__device__ __forceinline__ void count_one(unsigned *table, long long address) {
#if VALUE == 2
    count(table, *(const unsigned *)address);
#elif VALUE == 0
    atomicAdd(table + (*(const unsigned short *)address >> 2), 1u);
#else
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(*(const unsigned short *)address));
    atomicAdd(table + (__float_as_uint(value) >> 18), 1u);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS)
count_codes(const long long *pointers, const long long *sizes, const int *rows, const int *firsts,
            unsigned *tables, int chunk, int offset) {
    extern __shared__ unsigned table[];
    const int item = VALUE == 2 ? 4 : 2;
    for (int code = threadIdx.x; code < codes / 4; code += THREADS)
        ((uint4 *)table)[code] = make_uint4(0, 0, 0, 0);

    const int row = rows[blockIdx.x + offset];
    const long long part = (long long)(blockIdx.x + offset - firsts[row]) * chunk;
    const long long left = sizes[row] - part;
    const int number = left < chunk ? (int)left : chunk;
    const long long begin = pointers[row] + part * item, end = begin + (long long)number * item;
    // Whole groups of 16 bytes; what lies before and behind them is read one by one.
    const long long first = min((begin + 15) & -16LL, end), last = max(end & -16LL, first);
    __syncthreads();

    for (long long at = begin + threadIdx.x * item; at < first; at += THREADS * item)
        count_one(table, at);
    for (long long at = last + threadIdx.x * item; at < end; at += THREADS * item)
        count_one(table, at);
    const uint4 *groups = (const uint4 *)first;
    const int whole = (int)((last - first) / 16);
    int group = threadIdx.x;
    for (; group + (unroll - 1) * THREADS < whole; group += unroll * THREADS) {
        uint4 found[unroll];
#pragma unroll
        for (int i = 0; i < unroll; i++) found[i] = __ldcs(groups + group + i * THREADS);
#pragma unroll
        for (int i = 0; i < unroll; i++) {
            count(table, found[i].x);
            count(table, found[i].y);
            count(table, found[i].z);
            count(table, found[i].w);
        }
    }
    for (; group < whole; group += THREADS) {
        const uint4 found = groups[group];
        count(table, found.x);
        count(table, found.y);
        count(table, found.z);
        count(table, found.w);
    }
    __syncthreads();
    unsigned *total = tables + (long long)row * codes;
    for (int code = threadIdx.x; code < codes; code += THREADS)
        if (table[code]) atomicAdd(total + code, table[code]);
}
