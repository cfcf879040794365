/* ktk/abi.h - the contract between ktk and a backend.
 *
 * Plain C11 and nothing but data: a backend hands ktk one constant table, ktk does everything
 * else (threads, memory, routing, activation functions, Python). No C++ type, exception, allocator
 * or Python object crosses this line, so a backend may be built by any compiler, in any language.
 *
 * A backend answers three questions, for each instruction set it knows:
 *   - what is a weight matrix in memory (weight codec: pack_weight, unpack_weight),
 *   - what is a row of activations in memory (activation codec: pack_act, unpack_act),
 *   - what is the product of the two (micro-kernels: run).
 * All functions are re-entrant and stateless, never fail, and write only what their comment says.
 *
 * Names, as in BLAS: dst[m][n] = act[m][k] x weight[n][k]^T. m are rows: activations, which other
 * texts call A or the left-hand side. n are columns of dst, and what a checkpoint calls rows of a
 * weight. k is the depth of the sum. Sizes are counted in elements unless a name says bytes.
 * Strides of packed data are in bytes.
 *
 * The header is append-only within a MAJOR version: new fields go to the end of a struct, and
 * `struct_size` tells the reader which of them the writer knew. Every table has all fields of 1.0,
 * also those that may be NULL. Fields that a later MINOR appends are 0 or NULL to ktk in a table
 * that ends before them, and that will mean that they are not used.
 */
#ifndef KTK_ABI_H_
#define KTK_ABI_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* MAJOR: a field moved or changed its meaning. MINOR: a field was appended. */
#define KTK_ABI_MAJOR 1
#define KTK_ABI_MINOR 0

/* Name (and type tag) of the PyCapsule that carries a `const ktk_backend *`; the capsule is what
 * `__ktk_backend__()` of a backend's module returns. The table must outlive the process. */
#define KTK_CAPSULE_NAME "ktk.backend"

/* Packed weights and rows of packed activations start on this boundary. */
#define KTK_ALIGNMENT 64

/* Instruction sets, as a bit set. A bit means: the CPU has it and the operating system lets this
 * process use it (XCR0, and for AMX the permission of arch_prctl). */
typedef uint64_t ktk_isa;
#define KTK_ISA_NONE ((ktk_isa)0)
#define KTK_ISA_AVX2 ((ktk_isa)1 << 0)     /* AVX2, FMA, F16C, BMI2: x86-64-v3 */
#define KTK_ISA_AVX_VNNI ((ktk_isa)1 << 1) /* vpdpbusd on 256 bits, VEX */
#define KTK_ISA_AVX512 ((ktk_isa)1 << 2)   /* F, BW, CD, DQ, VL: x86-64-v4 */
#define KTK_ISA_AVX512_VNNI ((ktk_isa)1 << 3)
#define KTK_ISA_AVX512_BF16 ((ktk_isa)1 << 4)
#define KTK_ISA_AVX512_VBMI ((ktk_isa)1 << 5) /* with GFNI */
#define KTK_ISA_AVX512_FP16 ((ktk_isa)1 << 6)
#define KTK_ISA_AMX_INT8 ((ktk_isa)1 << 7) /* with AMX-TILE */
#define KTK_ISA_AMX_BF16 ((ktk_isa)1 << 8) /* with AMX-TILE */
#define KTK_ISA_NEON ((ktk_isa)1 << 32)    /* plain Armv8-A */
#define KTK_ISA_DOTPROD ((ktk_isa)1 << 33)
#define KTK_ISA_I8MM ((ktk_isa)1 << 34)
#define KTK_ISA_ARM_BF16 ((ktk_isa)1 << 35)
#define KTK_ISA_SVE ((ktk_isa)1 << 36)

/* What one element of a matrix is. ggml's types are KTK_GGML + ggml_type: their rows are made of
 * blocks that have the scales within, so that their format has neither scale nor zero, and group_k
 * is the elements of a block. (Enumerations have names, since bindgen before 0.62 fails at those
 * without when libclang is 16 or newer.) */
typedef uint32_t ktk_element;
enum ktk_elements {
  KTK_NONE = 0,
  KTK_F32 = 1,
  KTK_F16 = 2,
  KTK_BF16 = 3,
  KTK_I8 = 4, /* two's complement */
  KTK_U8 = 5,
  KTK_I4 = 6,     /* two's complement, even k in the low nibble */
  KTK_U4 = 7,     /* even k in the low nibble; without a zero point its zero is 8 */
  KTK_E4M3 = 8,   /* OCP FP8 E4M3 (finite, 0x7f and 0xff are NaN) */
  KTK_E5M2 = 9,   /* OCP FP8 E5M2 */
  KTK_E2M1 = 10,  /* OCP FP4, even k in the low nibble */
  KTK_UE8M0 = 11, /* OCP power-of-two scale, 2^(e-127), 255 is NaN */
  KTK_I16 = 12,   /* two's complement, of activations */
  KTK_GGML = 256
};

/* How a matrix is stored: value(n, k) = (element(n, k) - zero) * scale of the group it is in.
 * A group spans group_n of n and group_k of k; 0 means the whole extent. `scale` and `zero` are
 * KTK_NONE where the format has none. */
typedef struct ktk_format {
  ktk_element element;
  ktk_element scale;
  ktk_element zero;
  uint32_t group_n;
  uint32_t group_k;
} ktk_format;

/* A packed weight matrix: its extents and the format it is stored in. Extents are any, also less
 * than a group or a step: a layer that is divided among NUMA nodes packs parts of its weights as
 * matrices of their own, whose groups start at their first row and column. */
typedef struct ktk_matrix {
  size_t n, k;
  ktk_format format;
} ktk_matrix;

/* A weight matrix as it is given, row-major. Rows start `stride` bytes apart; so do the rows of
 * scale and zero, which hold one entry per group. */
typedef struct ktk_source {
  ktk_format format;
  const void *data, *scale, *zero;
  size_t data_stride, scale_stride, zero_stride;
} ktk_source;

/* Where a weight matrix is written to, row-major, in its own format: ktk_source the other way. */
typedef struct ktk_export {
  void *data, *scale, *zero; /* NULL where the format has none */
  size_t data_stride, scale_stride, zero_stride;
} ktk_export;

/* Where the core may cut what it does with one matrix: ranges of rows and of depth that functions
 * are called for. Every cut is a multiple of the step, or the end of the extent. */
typedef struct ktk_tile {
  uint32_t m_step; /* rows of act and dst are padded to a multiple of this */
  uint32_t n_step; /* weight columns that are packed together */
  uint32_t k_step; /* depth of activations that are packed together (partial pack_act) */
} ktk_tile;

/* Fetching packed weights ahead of their use. `ahead`: bytes from the line that is used to the one
 * that is fetched meanwhile; 0 fetches nothing. `cache`: the level that lines are fetched into;
 * KTK_FETCH_L2_THEN_L1 asks for L2, and for L1 when `l1_ahead` bytes (ktk_prefetch) are left to
 * the line. Kernels that cannot do that fetch into L2. `order`: KTK_FETCH_IN_ORDER, or
 * KTK_FETCH_BY_PAGES, in windows of 32 KiB one line of each of eight pages in turn, so that `ahead`
 * should be 32 KiB or more. Vector kernels do so with KTK_FETCH_L2_THEN_L1, where L1 is in order,
 * and for two tiles with KTK_FETCH_L2, AMX kernels with any, into L1 where that is all they are to
 * fetch into and else into L2; all else fetches in order. */
enum ktk_fetch_caches { KTK_FETCH_L1 = 1, KTK_FETCH_L2 = 2, KTK_FETCH_L2_THEN_L1 = 3 };
enum ktk_fetch_orders { KTK_FETCH_IN_ORDER = 0, KTK_FETCH_BY_PAGES = 1 };
typedef struct ktk_fetch {
  uint32_t ahead;
  uint16_t cache;
  uint16_t order;
} ktk_fetch;

/* What this CPU wants, measured (native/core/prefetch.cc) or set by the user: data, so that what
 * suits one CPU is not compiled into code that another one runs. No result depends on it. */
typedef struct ktk_prefetch {
  size_t struct_size;
  ktk_fetch few;    /* one tile of rows, which waits for memory */
  ktk_fetch one;    /* one tile of more rows, which computes about as long */
  ktk_fetch pair;   /* two or three tiles that read the same weights and share fetching the next */
  ktk_fetch many;   /* more of them */
  ktk_fetch decode; /* weights that are decoded to scratch, ahead of all tiles */
  /* Up to so many products of 64 bytes for each line of weights, a tile of rows waits for memory. A
   * line of bf16 or int8 makes one for each row, a line of int4, which becomes two of int8, two. */
  size_t few_products;
  /* Up to so many, micro-kernels that have a form for few rows which uses lines of weights in the
   * order of memory take that: the CPU's own prefetchers follow. */
  size_t in_order_products;
  /* Up to so many, vector kernels fetch by pages where an entry says so; 0: never. With more, a
   * core computes for longer than it reads in any order. */
  size_t pages_products;
  /* Bytes from the line that is used to the one that KTK_FETCH_L2_THEN_L1 brings from L2 to L1. */
  size_t l1_ahead;
  /* From so many rows on, micro-kernels that have a form which decodes weights once, to scratch,
   * for all tiles of rows take that; 0: every tile decodes in registers, beside its products. */
  size_t decode_rows;
  /* Independent sums that keep the multiplier busy: the cycles of a product times the products that
   * begin in a cycle. A tile of few rows may have fewer and leave the multiplier idle:
   * micro-kernels with another form for few rows, which has more of them, deal rows out so. 0:
   * evenly. */
  size_t accumulators;
} ktk_prefetch;

/* One product: dst[0..m)[n_begin..n_end) = act[0..m) x weight[n_begin..n_end)^T, in f32. */
typedef struct ktk_matmul {
  size_t struct_size;
  const ktk_matrix* matrix;
  const void* weight; /* the whole packed matrix */
  size_t n_begin, n_end;
  size_t m;
  /* Both have m rounded up to m_step rows. All of them may be read; what the rows of act from m on
   * hold is unspecified, and must not reach a result. NaN and Inf in one row must not reach
   * another. */
  const void* act;
  size_t act_stride; /* bytes; what act_size() returned */
  /* Points at row 0, column n_begin. Rows reach up to n_end rounded up to n_step. All of that may
   * be read and overwritten with anything; nothing is in it before. */
  float* dst;
  size_t dst_stride; /* floats, >= n_end - n_begin rounded up to n_step; a multiple of 16 */
  void* scratch;     /* scratch_size() bytes, KTK_ALIGNMENT-aligned, private to the call */
  const void* next;  /* where this worker will probably read weights next, to prefetch; or NULL */
  const ktk_prefetch* prefetch; /* never NULL */
} ktk_matmul;

/* A product over one packed layout, best up to m_max rows: GEMV, then GEMM. All micro-kernels of a
 * variant return the same bits for a row, whatever rows stand beside it. */
typedef struct ktk_ukernel {
  size_t struct_size;
  const char* name;
  size_t m_max; /* the last one of a variant says SIZE_MAX */
  /* Not less for more rows: asked once, for the most that there will be, up to m_max. NULL: needs
   * none. */
  size_t (*scratch_size)(const ktk_matrix* matrix, size_t m);
  void (*run)(const ktk_matmul* mm);
} ktk_ukernel;

/* One packed layout and the code for one instruction set that knows it. */
typedef struct ktk_variant {
  size_t struct_size;
  const char* name;     /* the instruction set: "amx_int8", "avx2" ... */
  ktk_isa required_isa; /* all of these bits */
  ktk_tile tile;

  /* Weight codec. Variants of a backend that share `layout` read each other's packed weights. */
  const char* layout;
  /* Bytes of a packed matrix, a multiple of KTK_ALIGNMENT. See source_size for those that depend on
   * what is in it. */
  size_t (*weight_size)(const ktk_matrix* matrix);
  /* Packs [n_begin, n_end) of `source` (whose row 0 is n = 0). Memory holds anything before: ranges
   * that cover all n, in any order and at the same time, write every byte of weight_size(), and
   * each range writes its own bytes only. Padding behind n - 1 belongs to the range that ends at
   * n. */
  void (*pack_weight)(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin,
                      size_t n_end, void* packed);
  /* For codecs that compress without loss, which no bound below the plain bytes can be given for:
   * the bytes that a matrix takes packed because of what rows [n_begin, n_end) of `source` hold,
   * weight_size() or more, a multiple of KTK_ALIGNMENT. Ranges are those of pack_weight; the
   * largest result of ranges that cover all n is what the matrix takes. weight_size() then says
   * what nearly all weights take, and pack_weight may be NULL. Both this and pack_sized are NULL,
   * or neither. */
  size_t (*source_size)(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin,
                        size_t n_end);
  /* Takes the place of pack_weight: `packed` has `bytes`, the largest result of source_size() or
   * more, the same for all ranges, which write every one of them. Whoever reads a packed matrix is
   * not told how large it is: it has to say so itself. */
  void (*pack_sized)(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin,
                     size_t n_end, void* packed, size_t bytes);
  /* Writes [n_begin, n_end) as rows of f32 to out, `out_stride` floats apart. Any rows: embeddings
   * are looked up one by one. */
  void (*unpack_weight)(const ktk_matrix* matrix, const void* packed, size_t n_begin, size_t n_end,
                        float* out, size_t out_stride);
  /* Offset in bytes of where a product that begins at column n starts to read a packed matrix: what
   * ktk_matmul.next is made of. NULL: the layout has no such place, and `next` stays NULL. */
  size_t (*weight_offset)(const ktk_matrix* matrix, size_t n);
  /* Writes [n_begin, n_end) of a packed matrix as a checkpoint gives what is in its format:
   * `pack_weight` of that makes the same weights again, bit by bit. It is how weights that were
   * quantized while they were packed are kept in a file that outlives the layout. Row 0 of the
   * target is n = 0; ranges are cut at n_step and at whole groups. NULL: only what comes in a
   * stored format can be kept. */
  void (*export_weight)(const ktk_matrix* matrix, const void* packed, size_t n_begin, size_t n_end,
                        const ktk_export* target);
  /* Whether `bytes` that come from a file, and may be anything, are a packed matrix: one that all
   * functions can be given, none of which then touches memory that it must not. Weights may be any.
   * Files keep packed bytes, in place of rows, where this is there in all variants of a backend,
   * which then share one layout and have export_weight. NULL: files keep rows. */
  int (*is_packed)(const ktk_matrix* matrix, const void* packed, size_t bytes);

  /* Activation codec; `matrix` is the weight that the rows will be multiplied with.
   * What a packed activation is: KTK_I8 with KTK_F32 per 1 x 128 ... */
  ktk_format act;
  /* The same where it depends on the weight; `act` is then that of the first stored format. Rows of
   * one such format and depth are the same bytes whatever weight they were packed for, so that gate
   * and up of an expert, which read the same tokens, may share them. NULL: `act` holds for all, and
   * rows are packed for both unless gate and up are stored in one format. */
  void (*act_format)(const ktk_matrix* matrix, ktk_format* format);
  /* Bytes of one packed row, a multiple of KTK_ALIGNMENT. */
  size_t (*act_size)(const ktk_matrix* matrix);
  /* Packs [k_begin, k_end) of m rows. x points at k_begin, `x_stride` floats apart; act points at
   * the start of the packed rows. Packing the last k also writes the padding; what stays unwritten
   * of a row is part of no result. */
  void (*pack_act)(const ktk_matrix* matrix, size_t m, size_t k_begin, size_t k_end, const float* x,
                   size_t x_stride, void* act, size_t act_stride);
  /* Writes m whole rows as f32, `out_stride` floats apart. */
  void (*unpack_act)(const ktk_matrix* matrix, size_t m, const void* act, size_t act_stride,
                     float* out, size_t out_stride);

  /* By ascending m_max. */
  const ktk_ukernel* ukernels;
  size_t num_ukernels;
  /* Called on a worker before its first and after its last run of a batch (AMX palette ...). Both
   * NULL, or neither. */
  void (*enter)(void);
  void (*leave)(void);
} ktk_variant;

/* A format that a checkpoint may come in, and which of `formats` it is stored as by default. */
typedef struct ktk_accept {
  ktk_format given;
  uint32_t stored;
} ktk_accept;

typedef struct ktk_backend {
  size_t struct_size;
  uint32_t abi_major, abi_minor;
  const char* name;
  const ktk_format* formats; /* as stored; the first one is the default */
  size_t num_formats;
  const ktk_accept* accepts; /* as given */
  size_t num_accepts;
  const ktk_variant* const* variants; /* best first */
  size_t num_variants;
} ktk_backend;

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KTK_ABI_H_ */
