// AMX-INT8: Sapphire Rapids and later servers.
#include "llamafile/amx.h"
#include "llamafile/variant.h"

namespace ktk::llamafile {
namespace {

// Few rows wait for memory, or for the operands: they are decoded as they are read.
constexpr ktk_ukernel kAmxUkernels[] = {
    ukernel("vnni_4x32", Dot::kMaxRows, either<multiply, floats::multiply<Dot>>),
    ukernel("amx_32x32", either<multiply_amx, floats::multiply<Dot>>, amx_scratch_size),
};
constexpr ktk_variant kOthers = make_table(kAmxUkernels);

}  // namespace
}  // namespace ktk::llamafile

extern "C" {
extern const ktk_variant KTK_VARIANT(llamafile);
constexpr ktk_variant KTK_VARIANT(llamafile) =
    ktk::llamafile::WithBf16<ktk::llamafile::kOthers>::make(ktk::llamafile::kTileRows,
                                                            ktk::enter_amx, ktk::leave_amx);
}
