//! A small but complete backend in Rust: f32 weights, any CPU. All it knows of ktk is ktk/abi.h.
//!
//! Packed weight: columns in blocks of 16, each block a sequence of k vectors of 16 floats,
//!
//!   block 0: w(0..15, 0) w(0..15, 1) ... w(0..15, k - 1)   block 1: w(16..31, 0) ...
//!
//! so that a product reads memory in order and computes 16 columns side by side. Columns behind the
//! last one are zero. An activation is a row of k floats, padded to an odd number of cache lines.
//!
//! ktk calls functions of the table with pointers and sizes that abi.h vouches for: each function
//! makes slices of them once, and what it calls is safe code.

use ktk_abi::*;
use std::ffi::c_void;
use std::mem::{size_of, transmute};
use std::slice::{from_raw_parts, from_raw_parts_mut};

const COLUMNS: usize = 16;
const ROWS: usize = 4;
const LINE: usize = KTK_ALIGNMENT as usize;

type Block = [f32; COLUMNS]; // one k of 16 columns

// --- codecs ------------------------------------------------------------------------------------

fn round_up(size: usize, step: usize) -> usize {
    (size + step - 1) / step * step
}

unsafe extern "C" fn weight_size(matrix: *const ktk_matrix) -> usize {
    round_up((*matrix).n, COLUMNS) * (*matrix).k * size_of::<f32>()
}

/// The vectors of the block that column n is in.
unsafe fn block_of<'a>(matrix: &ktk_matrix, packed: *const c_void, n: usize) -> &'a [Block] {
    let blocks = packed.cast::<Block>();
    from_raw_parts(blocks.add(n / COLUMNS * matrix.k), matrix.k)
}

/// A row of a source: any byte may be its first.
unsafe fn source_row<'a>(source: &ktk_source, n: usize, k: usize) -> &'a [[u8; 4]] {
    from_raw_parts(source.data.cast::<u8>().add(n * source.data_stride).cast(), k)
}

unsafe extern "C" fn pack_weight(
    matrix: *const ktk_matrix,
    source: *const ktk_source,
    n_begin: usize,
    n_end: usize,
    packed: *mut c_void,
) {
    let (matrix, source) = (&*matrix, &*source);
    for n in n_begin..round_up(n_end, COLUMNS) {
        // Ranges are packed at the same time, each by whole blocks.
        let first = packed.cast::<Block>().add(n / COLUMNS * matrix.k);
        let block = from_raw_parts_mut(first, matrix.k);
        if n < n_end {
            for (out, value) in block.iter_mut().zip(source_row(source, n, matrix.k)) {
                out[n % COLUMNS] = f32::from_ne_bytes(*value);
            }
        } else {
            block.iter_mut().for_each(|out| out[n % COLUMNS] = 0.0);
        }
    }
}

unsafe extern "C" fn unpack_weight(
    matrix: *const ktk_matrix,
    packed: *const c_void,
    n_begin: usize,
    n_end: usize,
    out: *mut f32,
    out_stride: usize,
) {
    let matrix = &*matrix;
    for n in n_begin..n_end {
        let row = from_raw_parts_mut(out.add((n - n_begin) * out_stride), matrix.k);
        for (value, vector) in row.iter_mut().zip(block_of(matrix, packed, n)) {
            *value = vector[n % COLUMNS];
        }
    }
}

/// Rows an odd number of cache lines apart do not compete for one set of the L1 cache.
unsafe extern "C" fn act_size(matrix: *const ktk_matrix) -> usize {
    let lines = round_up((*matrix).k * size_of::<f32>(), LINE) / LINE;
    (lines | 1) * LINE
}

unsafe fn act_row<'a>(act: *const c_void, stride: usize, row: usize, k: usize) -> &'a [f32] {
    from_raw_parts(act.cast::<u8>().add(row * stride).cast(), k)
}

unsafe extern "C" fn pack_act(
    _matrix: *const ktk_matrix,
    m: usize,
    k_begin: usize,
    k_end: usize,
    x: *const f32,
    x_stride: usize,
    act: *mut c_void,
    act_stride: usize,
) {
    for row in 0..m {
        let begin = act.cast::<u8>().add(row * act_stride).cast::<f32>().add(k_begin);
        let given = from_raw_parts(x.add(row * x_stride), k_end - k_begin);
        from_raw_parts_mut(begin, k_end - k_begin).copy_from_slice(given);
    }
}

unsafe extern "C" fn unpack_act(
    matrix: *const ktk_matrix,
    m: usize,
    act: *const c_void,
    act_stride: usize,
    out: *mut f32,
    out_stride: usize,
) {
    let k = (*matrix).k;
    for row in 0..m {
        let given = act_row(act, act_stride, row, k);
        from_raw_parts_mut(out.add(row * out_stride), k).copy_from_slice(given);
    }
}

// --- micro-kernels -----------------------------------------------------------------------------

/// `M` rows times one block of columns. Every output is one chain over k, and Rust contracts no
/// a * b + c, so the number of rows computed together cannot change its bits.
fn product<const M: usize>(weight: &[Block], act: [&[f32]; M]) -> [Block; M] {
    let act = act.map(|row| &row[..weight.len()]);
    let mut sums = [[0.0; COLUMNS]; M];
    for (k, vector) in weight.iter().enumerate() {
        for (sum, row) in sums.iter_mut().zip(act) {
            for (total, value) in sum.iter_mut().zip(vector) {
                *total += row[k] * value;
            }
        }
    }
    sums
}

/// Rows [row, row + M) of one block, written where the call wants them.
unsafe fn rows<const M: usize>(mm: &ktk_matmul, n: usize, row: usize) {
    let matrix = &*mm.matrix;
    let act = std::array::from_fn(|r| act_row(mm.act, mm.act_stride, row + r, matrix.k));
    let sums = product::<M>(block_of(matrix, mm.weight, n), act);
    for (r, sum) in sums.iter().enumerate() {
        *mm.dst.add((row + r) * mm.dst_stride + n - mm.n_begin).cast::<Block>() = *sum;
    }
}

unsafe extern "C" fn gemv(mm: *const ktk_matmul) {
    let mm = &*mm;
    for n in (mm.n_begin..mm.n_end).step_by(COLUMNS) {
        (0..mm.m).for_each(|row| rows::<1>(mm, n, row));
    }
}

unsafe extern "C" fn gemm(mm: *const ktk_matmul) {
    let mm = &*mm;
    let tiled = mm.m / ROWS * ROWS;
    for n in (mm.n_begin..mm.n_end).step_by(COLUMNS) {
        (0..tiled).step_by(ROWS).for_each(|row| rows::<ROWS>(mm, n, row));
        (tiled..mm.m).for_each(|row| rows::<1>(mm, n, row));
    }
}

// --- tables ------------------------------------------------------------------------------------

/// Tables point at each other and never change, which Rust cannot know of pointers in C's structs.
#[repr(transparent)]
pub struct Constant<T>(T);
unsafe impl<T> Sync for Constant<T> {}

/// What a table leaves out is zero, in abi.h: NULL, and so is what a later abi.h appends.
macro_rules! rest {
    ($table:ty) => {
        unsafe { transmute::<[u8; size_of::<$table>()], $table>([0; size_of::<$table>()]) }
    };
}

const F32: ktk_format =
    ktk_format { element: KTK_F32, scale: KTK_NONE, zero: KTK_NONE, group_n: 0, group_k: 0 };

static UKERNELS: Constant<[ktk_ukernel; 2]> = Constant([
    ktk_ukernel {
        struct_size: size_of::<ktk_ukernel>(),
        name: b"gemv\0".as_ptr().cast(),
        m_max: 3,
        run: Some(gemv),
        ..rest!(ktk_ukernel)
    },
    ktk_ukernel {
        struct_size: size_of::<ktk_ukernel>(),
        name: b"gemm\0".as_ptr().cast(),
        m_max: usize::MAX,
        run: Some(gemm),
        ..rest!(ktk_ukernel)
    },
]);

static BASELINE: Constant<ktk_variant> = Constant(ktk_variant {
    struct_size: size_of::<ktk_variant>(),
    name: b"baseline\0".as_ptr().cast(),
    required_isa: 0,
    tile: ktk_tile { m_step: 1, n_step: COLUMNS as u32, k_step: 1 },
    act: F32,
    layout: b"rust-f32-n16\0".as_ptr().cast(),
    weight_size: Some(weight_size),
    pack_weight: Some(pack_weight),
    unpack_weight: Some(unpack_weight),
    act_size: Some(act_size),
    pack_act: Some(pack_act),
    unpack_act: Some(unpack_act),
    ukernels: UKERNELS.0.as_ptr(),
    num_ukernels: UKERNELS.0.len(),
    ..rest!(ktk_variant)
});

static VARIANTS: Constant<[*const ktk_variant; 1]> = Constant([&BASELINE.0]);
static FORMATS: [ktk_format; 1] = [F32];
static ACCEPTS: [ktk_accept; 1] = [ktk_accept { given: F32, stored: 0 }];

#[no_mangle]
pub static rust_backend: Constant<ktk_backend> = Constant(ktk_backend {
    struct_size: size_of::<ktk_backend>(),
    abi_major: KTK_ABI_MAJOR,
    abi_minor: KTK_ABI_MINOR,
    name: b"RUST_F32\0".as_ptr().cast(),
    formats: FORMATS.as_ptr(),
    num_formats: FORMATS.len(),
    accepts: ACCEPTS.as_ptr(),
    num_accepts: ACCEPTS.len(),
    variants: VARIANTS.0.as_ptr(),
    num_variants: VARIANTS.0.len(),
});
