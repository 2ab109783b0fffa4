// One element per thread and one kernel per family, so that a test can compare whole arrays with numpy.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#define AT const int i = blockIdx.x * blockDim.x + threadIdx.x; if (i >= n) return

extern "C" __global__ void arithmetic(const float* a, const float* b, const float* c, float* out, int n) {
  AT;
  float* o = out + 9 * (size_t)i;
  o[0] = __fadd_rn(a[i], b[i]);
  o[1] = __fsub_rn(a[i], b[i]);
  o[2] = __fmul_rn(a[i], b[i]);
  o[3] = __fdiv_rn(a[i], b[i]);
  o[4] = __fmaf_rn(a[i], b[i], c[i]);
  o[5] = __frcp_rn(a[i]);
  o[6] = __fsqrt_rn(a[i]);
  o[7] = __fadd_rn(__fmul_rn(a[i], b[i]), c[i]);
  o[8] = a[i] * b[i] + c[i];
}

extern "C" __global__ void doubles(const double* a, const double* b, double* out, int n) {
  AT;
  double* o = out + 8 * (size_t)i;
  o[0] = __dadd_rn(a[i], b[i]);
  o[1] = __dsub_rn(a[i], b[i]);
  o[2] = __dmul_rn(a[i], b[i]);
  o[3] = __ddiv_rn(a[i], b[i]);
  o[4] = __drcp_rn(a[i]);
  o[5] = __dsqrt_rn(a[i]);
  o[6] = __double2float_rn(a[i]);
  o[7] = __fma_rn(a[i], b[i], -__dmul_rn(a[i], b[i]));
}

extern "C" __global__ void extremes(const float* a, const float* b, float* out, int n) {
  AT;
  float* o = out + 8 * (size_t)i;
  o[0] = fminf(a[i], b[i]);
  o[1] = fmaxf(a[i], b[i]);
  o[2] = min(a[i], b[i]);
  o[3] = max(a[i], b[i]);
  o[4] = (float)fmin((double)a[i], (double)b[i]);
  o[5] = (float)fmax((double)a[i], (double)b[i]);
  o[6] = fabsf(a[i]);
  o[7] = rintf(a[i]);
}

extern "C" __global__ void to_integers(const float* a, const double* b, int* out, long long* wide, int n) {
  AT;
  int* o = out + 8 * (size_t)i;
  o[0] = __float2int_rn(a[i]);
  o[1] = __float2int_rz(a[i]);
  o[2] = __float2int_rd(a[i]);
  o[3] = __float2int_ru(a[i]);
  o[4] = (int)__float2uint_rn(a[i]);
  o[5] = (int)__float2uint_rz(a[i]);
  o[6] = __double2int_rn(b[i]);
  o[7] = __double2int_rz(b[i]);
  wide[2 * i] = __float2ll_rn(a[i]);
  wide[2 * i + 1] = __double2ll_rz(b[i]);
}

extern "C" __global__ void from_integers(const int* a, const long long* b, float* out, double* wide, int n) {
  AT;
  out[3 * i] = __int2float_rn(a[i]);
  out[3 * i + 1] = __uint2float_rn((unsigned)a[i]);
  out[3 * i + 2] = __ll2float_rn(b[i]);
  wide[i] = __ll2double_rn(b[i]);
}

extern "C" __global__ void bits(const float* a, const double* b, unsigned* out, double* wide, int n) {
  AT;
  unsigned* o = out + 12 * (size_t)i;
  const int word = __float_as_int(a[i]);
  o[0] = __float_as_uint(__uint_as_float(__float_as_uint(a[i])));
  o[1] = __float_as_uint(__int_as_float(word));
  o[2] = __popc(word);
  o[3] = __clz(word);
  o[4] = __ffs(word);
  o[5] = (unsigned)__double2hiint(b[i]);
  o[6] = (unsigned)__double2loint(b[i]);
  o[7] = __byte_perm((unsigned)word, 0x44332211u, 0x7610u);
  o[8] = __byte_perm((unsigned)word, 0x44332211u, 0x000bu);
  o[9] = __umulhi((unsigned)word, 0x10000u);
  o[10] = (unsigned)min(word, 5) ^ (unsigned)max(word, -5);
  o[11] = min((unsigned)word, 77u) + __ldg(reinterpret_cast<const unsigned*>(a) + i);
  wide[2 * i] = __longlong_as_double(__double_as_longlong(b[i]));
  wide[2 * i + 1] = __hiloint2double(__double2hiint(b[i]), __double2loint(b[i]));
}

extern "C" __global__ void narrow(const float* a, __nv_bfloat16* b, __half* h, unsigned char* q, int n) {
  AT;
  b[i] = __float2bfloat16_rn(a[i]);
  h[i] = __float2half_rn(a[i]);
  q[2 * i] = __nv_cvt_float_to_fp8(a[i], __NV_SATFINITE, __NV_E4M3);
  q[2 * i + 1] = __nv_cvt_float_to_fp8(a[i], __NV_NOSAT, __NV_E4M3);
}

extern "C" __global__ void
widen(const __nv_bfloat16* b, const __half* h, const unsigned char* q, float* out, int n) {
  AT;
  __nv_fp8_e4m3 code;
  code.__x = q[i];
  out[3 * i] = __bfloat162float(b[i]);
  out[3 * i + 1] = __half2float(h[i]);
  out[3 * i + 2] = (float)code;
}

extern "C" __global__ void pairs(const float2* a, __nv_bfloat162* b, __half2* h, float4* out, int n) {
  AT;
  b[i] = __float22bfloat162_rn(a[i]);
  h[i] = __floats2half2_rn(a[i].x, a[i].y);
  const float2 wide = __bfloat1622float2(b[i]);
  out[i] = make_float4(wide.x, __high2float(b[i]), __low2float(h[i]), __half22float2(h[i]).y);
}

extern "C" __global__ void approximate(const float* a, float* out, int n) {
  AT;
  out[3 * i] = mhc_host_rcp_approx(a[i]);
  out[3 * i + 1] = mhc_host_ex2_approx(a[i]);
  out[3 * i + 2] = mhc_host_rsqrt_approx(a[i]);
}

// One warp; every lane writes what it got.
extern "C" __global__ void shuffles(float* f, double* d, long long* l, unsigned* u) {
  const int lane = threadIdx.x;
  const unsigned all = 0xffffffffu;
  f[lane] = __shfl_sync(all, lane * 1.5f, lane + 33);
  f[32 + lane] = __shfl_sync(all, lane * 1.5f, 5, 8);
  d[lane] = __shfl_xor_sync(all, lane + 0.25, 6);
  d[32 + lane] = __shfl_xor_sync(all, lane + 0.25, 20, 16);
  l[lane] = __shfl_up_sync(all, 10000000000ll + lane, 3);
  l[32 + lane] = __shfl_up_sync(all, 10000000000ll + lane, 3, 8);
  u[lane] = __shfl_down_sync(all, 100u + lane, 9);
  u[32 + lane] = __shfl_down_sync(all, 100u + lane, 2, 4);
  u[64 + lane] = __ballot_sync(all, lane % 3 == 0);
  u[96 + lane] = 2 * __any_sync(all, lane == 31) + __all_sync(all, lane < 31);
  if (lane < 8) u[128 + lane] = __ballot_sync(0xff, lane & 1);
}

extern "C" __global__ void block_votes(int* out) {
  const int t = threadIdx.x;
  out[3 * t] = __syncthreads_count(t % 5);
  out[3 * t + 1] = __syncthreads_and(t < 70);
  out[3 * t + 2] = __syncthreads_or(t == 64);
}

extern "C" __global__ void
atomics(int* i, unsigned* u, unsigned long long* l, float* f, double* d, unsigned* tickets) {
  const unsigned t = threadIdx.x;
  tickets[t] = atomicAdd(u, 1u);
  atomicAdd(i, -(int)t);
  atomicAdd(l, 1ull << 40);
  atomicAdd(f, 0.5f);
  atomicAdd(d, 0.25);
  atomicMax(u + 1, t * 7 % 64);
  atomicMin(u + 2, t + 3);
  atomicCAS(u + 3, t, t + 1);
  atomicExch(u + 4, t);
  atomicOr(u + 5, 1u << (t & 31));
  atomicAnd(u + 6, ~(1u << (t & 15)));
  if (t == 0) {
    tickets[64] = clock64() <= clock64() ? 1 : 0;
    __threadfence();
    __threadfence_block();
    unsigned copy[4];
    memset(copy, 0, sizeof copy);
    memcpy(copy, tickets + 64, 4);
    tickets[65] = copy[0] + copy[3];
  }
}
