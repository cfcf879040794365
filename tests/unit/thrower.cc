// A backend whose functions throw, which abi.h forbids: another backend's table with one lie.
#include "ktk/abi.h"

extern "C" const ktk_backend* lying_table(const ktk_backend* honest, int throws_when_packing) {
  static ktk_variant variants[2];
  static const ktk_variant* list[2];
  static ktk_ukernel kernel;
  static ktk_backend tables[2];
  const int i = throws_when_packing ? 1 : 0;
  variants[i] = *honest->variants[honest->num_variants - 1];
  if (throws_when_packing) {
    static const auto pack = variants[i].pack_weight;
    variants[i].pack_weight = [](const ktk_matrix* matrix, const ktk_source* source, size_t begin,
                                 size_t end, void* packed) {
      if (*static_cast<const float*>(source->data) != 0) throw 42;
      pack(matrix, source, begin, end, packed);
    };
  } else {
    kernel = variants[i].ukernels[variants[i].num_ukernels - 1];
    kernel.run = [](const ktk_matmul*) { throw "text"; };
    variants[i].ukernels = &kernel;
    variants[i].num_ukernels = 1;
  }
  list[i] = &variants[i];
  tables[i] = *honest;
  tables[i].variants = &list[i];
  tables[i].num_variants = 1;
  return &tables[i];
}
