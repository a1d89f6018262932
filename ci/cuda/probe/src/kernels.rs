//! Kernels of CubeCL that the sections launch.
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use crate::lab::Lab;

const LANES: usize = 4;
const UNITS: u32 = 256;

#[cube(launch)]
fn sum_of_two<N: Size>(
    a: &[Vector<f32, N>],
    b: &[Vector<f32, N>],
    out: &mut [Vector<f32, N>],
    from: usize,
) {
    if ABSOLUTE_POS < out.len() {
        let at = from + ABSOLUTE_POS;
        out[ABSOLUTE_POS] = a[at] + b[at];
    }
}

#[cube(launch)]
fn sum_of_four<N: Size>(
    a: &[Vector<f32, N>],
    b: &[Vector<f32, N>],
    c: &[Vector<f32, N>],
    d: &[Vector<f32, N>],
    out: &mut [Vector<f32, N>],
    from: usize,
) {
    if ABSOLUTE_POS < out.len() {
        let at = from + ABSOLUTE_POS;
        out[ABSOLUTE_POS] = ((a[at] + b[at]) + c[at]) + d[at];
    }
}

#[cube(launch)]
fn copy_into<N: Size>(from: &[Vector<f32, N>], out: &mut [Vector<f32, N>]) {
    if ABSOLUTE_POS < out.len() {
        out[ABSOLUTE_POS] = from[ABSOLUTE_POS];
    }
}

fn cubes(elements: usize) -> (CubeCount, CubeDim) {
    (
        CubeCount::Static((elements / LANES).div_ceil(UNITS as usize) as u32, 1, 1),
        CubeDim::new_1d(UNITS),
    )
}

/// The sum, in the order given, of the same `length` numbers from `from` of each; fresh memory. Two or four of them.
pub fn sum_in_order(lab: &Lab, peers: &[CubeTensor], from: usize, length: usize) -> CubeTensor {
    assert!(
        from.is_multiple_of(LANES) && length.is_multiple_of(LANES),
        "whole vectors"
    );
    let out = lab.empty([length], DType::F32);
    let (count, dim) = cubes(length);
    let arg = |rank: usize| peers[rank].clone().into_buffer_arg();
    let result = out.clone().into_buffer_arg();
    match peers.len() {
        2 => sum_of_two::launch(
            &lab.client,
            count,
            dim,
            LANES,
            arg(0),
            arg(1),
            result,
            from / LANES,
        ),
        4 => sum_of_four::launch(
            &lab.client,
            count,
            dim,
            LANES,
            arg(0),
            arg(1),
            arg(2),
            arg(3),
            result,
            from / LANES,
        ),
        ranks => panic!("no kernel for {ranks} ranks here"),
    }
    out
}

/// Writes `from` into memory that is there already.
pub fn overwrite(lab: &Lab, from: &CubeTensor, out: &CubeTensor) {
    let (count, dim) = cubes(out.meta.num_elements());
    copy_into::launch(
        &lab.client,
        count,
        dim,
        LANES,
        from.clone().into_buffer_arg(),
        out.clone().into_buffer_arg(),
    );
}
