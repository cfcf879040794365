/* A small but complete backend in C: f32 weights, any CPU. All it knows of ktk is ktk/abi.h.
 *
 * Packed weight: columns in blocks of 16, each block a sequence of k vectors of 16 floats,
 *
 *   block 0: w(0..15, 0) w(0..15, 1) ... w(0..15, k - 1)   block 1: w(16..31, 0) ...
 *
 * so that a product reads memory in order and computes 16 columns side by side. Columns behind the
 * last one are zero. An activation is a row of k floats, padded to an odd number of cache lines.
 */
#include <Python.h>
#include <string.h>

#include "ktk/abi.h"

enum { kColumns = 16, kRows = 4 };

static size_t round_up(size_t size, size_t step) { return (size + step - 1) / step * step; }

/* --- codecs ------------------------------------------------------------------------------- */

static size_t weight_size(const ktk_matrix* matrix) {
  return round_up(matrix->n, kColumns) * matrix->k * sizeof(float);
}

static float* packed_block(const ktk_matrix* matrix, void* packed, size_t n) {
  return (float*)packed + n / kColumns * kColumns * matrix->k;
}

static void pack_weight(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin,
                        size_t n_end, void* packed) {
  const size_t padded_end = round_up(n_end, kColumns);
  for (size_t n = n_begin; n < padded_end; ++n) {
    float* out = packed_block(matrix, packed, n) + n % kColumns;
    const char* row = (const char*)source->data + n * source->data_stride;
    for (size_t k = 0; k < matrix->k; ++k) {
      float value = 0;
      if (n < n_end) memcpy(&value, row + k * sizeof value, sizeof value);
      out[k * kColumns] = value;
    }
  }
}

static void unpack_weight(const ktk_matrix* matrix, const void* packed, size_t n_begin,
                          size_t n_end, float* out, size_t out_stride) {
  for (size_t n = n_begin; n < n_end; ++n) {
    const float* in = packed_block(matrix, (void*)packed, n) + n % kColumns;
    float* row = out + (n - n_begin) * out_stride;
    for (size_t k = 0; k < matrix->k; ++k) row[k] = in[k * kColumns];
  }
}

/* Rows an odd number of cache lines apart do not compete for one set of the L1 cache. */
static size_t act_size(const ktk_matrix* matrix) {
  const size_t lines = round_up(matrix->k * sizeof(float), KTK_ALIGNMENT) / KTK_ALIGNMENT;
  return (lines | 1) * KTK_ALIGNMENT;
}

static void pack_act(const ktk_matrix* matrix, size_t m, size_t k_begin, size_t k_end,
                     const float* x, size_t x_stride, void* act, size_t act_stride) {
  (void)matrix;
  for (size_t row = 0; row < m; ++row) {
    float* out = (float*)((char*)act + row * act_stride) + k_begin;
    memcpy(out, x + row * x_stride, (k_end - k_begin) * sizeof *out);
  }
}

static void unpack_act(const ktk_matrix* matrix, size_t m, const void* act, size_t act_stride,
                       float* out, size_t out_stride) {
  for (size_t row = 0; row < m; ++row) {
    memcpy(out + row * out_stride, (const char*)act + row * act_stride, matrix->k * sizeof *out);
  }
}

/* --- micro-kernels ------------------------------------------------------------------------ */

/* `rows` rows of one block of columns. Every output is one chain over k, so the number of rows
 * computed together cannot change its bits. */
static inline void block(const ktk_matmul* mm, size_t n, size_t row, int rows) {
  const float* weight = packed_block(mm->matrix, (void*)mm->weight, n);
  const float* act[kRows];
  float sum[kRows][kColumns] = {{0}};
  for (int r = 0; r < rows; ++r) {
    act[r] = (const float*)((const char*)mm->act + (row + (size_t)r) * mm->act_stride);
  }
  for (size_t k = 0; k < mm->matrix->k; ++k) {
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < kColumns; ++c) sum[r][c] += act[r][k] * weight[k * kColumns + c];
    }
  }
  for (int r = 0; r < rows; ++r) {
    memcpy(mm->dst + (row + (size_t)r) * mm->dst_stride + (n - mm->n_begin), sum[r], sizeof sum[r]);
  }
}

static void gemv(const ktk_matmul* mm) {
  for (size_t n = mm->n_begin; n < mm->n_end; n += kColumns) {
    for (size_t row = 0; row < mm->m; ++row) block(mm, n, row, 1);
  }
}

static void gemm(const ktk_matmul* mm) {
  for (size_t n = mm->n_begin; n < mm->n_end; n += kColumns) {
    size_t row = 0;
    for (; row + kRows <= mm->m; row += kRows) block(mm, n, row, kRows);
    for (; row < mm->m; ++row) block(mm, n, row, 1);
  }
}

/* --- tables ------------------------------------------------------------------------------- */

#define F32_FORMAT {.element = KTK_F32, .scale = KTK_NONE, .zero = KTK_NONE}

static const ktk_ukernel kUkernels[] = {
    {.struct_size = sizeof(ktk_ukernel), .name = "gemv", .m_max = 3, .run = gemv},
    {.struct_size = sizeof(ktk_ukernel), .name = "gemm", .m_max = SIZE_MAX, .run = gemm},
};

static const ktk_variant kBaseline = {
    .struct_size = sizeof(ktk_variant),
    .name = "baseline",
    .required_isa = KTK_ISA_NONE,
    .tile = {.m_step = 1, .n_step = kColumns, .k_step = 1},
    .act = F32_FORMAT,
    .layout = "demo-f32-n16",
    .weight_size = weight_size,
    .pack_weight = pack_weight,
    .unpack_weight = unpack_weight,
    .act_size = act_size,
    .pack_act = pack_act,
    .unpack_act = unpack_act,
    .ukernels = kUkernels,
    .num_ukernels = sizeof kUkernels / sizeof *kUkernels,
};

static const ktk_variant* const kVariants[] = {&kBaseline};
static const ktk_format kFormats[] = {F32_FORMAT};
static const ktk_accept kAccepts[] = {{.given = F32_FORMAT, .stored = 0}};

#define TABLE(major, public_name)         \
  {                                       \
      .struct_size = sizeof(ktk_backend), \
      .abi_major = (major),               \
      .abi_minor = KTK_ABI_MINOR,         \
      .name = public_name,                \
      .formats = kFormats,                \
      .num_formats = 1,                   \
      .accepts = kAccepts,                \
      .num_accepts = 1,                   \
      .variants = kVariants,              \
      .num_variants = 1,                  \
  }

static const ktk_backend kDemo = TABLE(KTK_ABI_MAJOR, "DEMO_F32");
/* Two that ktk must refuse: made for a later ABI, and a table with a hole. */
static const ktk_backend kFuture = TABLE(KTK_ABI_MAJOR + 1, "DEMO_FUTURE");
static const ktk_backend kHollow = {
    .struct_size = sizeof(ktk_backend),
    .abi_major = KTK_ABI_MAJOR,
    .abi_minor = KTK_ABI_MINOR,
    .name = "DEMO_HOLLOW",
};

/* --- Python ------------------------------------------------------------------------------- */

#define EXPORT(function, table)                                  \
  static PyObject* function(PyObject* self, PyObject* unused) {  \
    (void)self, (void)unused;                                    \
    return PyCapsule_New((void*)&table, KTK_CAPSULE_NAME, NULL); \
  }
EXPORT(export_demo, kDemo)
EXPORT(export_future, kFuture)
EXPORT(export_hollow, kHollow)

/* An entry point may name a module or any object in it; the refused ones are modules in a module.
 */
#define MODULE(variable, module_name, function)                                      \
  static PyMethodDef variable##_methods[] = {                                        \
      {"__ktk_backend__", function, METH_NOARGS, "Return the backend table."}, {0}}; \
  static struct PyModuleDef variable = {                                             \
      PyModuleDef_HEAD_INIT,                                                         \
      .m_name = module_name,                                                         \
      .m_methods = variable##_methods,                                               \
  };
MODULE(demo_module, "ktk_demo_backend", export_demo)
MODULE(future_module, "ktk_demo_backend.future", export_future)
MODULE(hollow_module, "ktk_demo_backend.hollow", export_hollow)

static int add(PyObject* parent, const char* name, struct PyModuleDef* definition) {
  PyObject* child = PyModule_Create(definition);
  if (child == NULL) return -1;
  const int status = PyModule_AddObjectRef(parent, name, child);
  Py_DECREF(child);
  return status;
}

PyMODINIT_FUNC PyInit_ktk_demo_backend(void) {
  PyObject* module = PyModule_Create(&demo_module);
  if (module == NULL || add(module, "future", &future_module) < 0 ||
      add(module, "hollow", &hollow_module) < 0) {
    Py_XDECREF(module);
    return NULL;
  }
  return module;
}
