// CUDA's built-in vector types, with the sizes and alignments that CUDA gives them.
#pragma once

#define MHC_VECTOR2(name, T)          \
  struct alignas(2 * sizeof(T)) name { \
    T x, y;                            \
  };                                   \
  MHC_INLINE name make_##name(T x, T y) { return name{x, y}; }
#define MHC_VECTOR3(name, T) \
  struct name {               \
    T x, y, z;                \
  };                          \
  MHC_INLINE name make_##name(T x, T y, T z) { return name{x, y, z}; }
#define MHC_VECTOR4(name, T)                                     \
  struct alignas(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) name {  \
    T x, y, z, w;                                                 \
  };                                                              \
  MHC_INLINE name make_##name(T x, T y, T z, T w) { return name{x, y, z, w}; }

MHC_VECTOR2(char2, signed char)
MHC_VECTOR4(char4, signed char)
MHC_VECTOR2(uchar2, unsigned char)
MHC_VECTOR4(uchar4, unsigned char)
MHC_VECTOR2(short2, short)
MHC_VECTOR4(short4, short)
MHC_VECTOR2(ushort2, unsigned short)
MHC_VECTOR4(ushort4, unsigned short)
MHC_VECTOR2(int2, int)
MHC_VECTOR3(int3, int)
MHC_VECTOR4(int4, int)
MHC_VECTOR2(uint2, unsigned)
MHC_VECTOR3(uint3, unsigned)
MHC_VECTOR4(uint4, unsigned)
MHC_VECTOR2(longlong2, long long)
MHC_VECTOR2(ulonglong2, unsigned long long)
MHC_VECTOR2(float2, float)
MHC_VECTOR3(float3, float)
MHC_VECTOR4(float4, float)
MHC_VECTOR2(double2, double)
#undef MHC_VECTOR2
#undef MHC_VECTOR3
#undef MHC_VECTOR4

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
