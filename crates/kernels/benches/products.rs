//! Matrix products of a GPT's training step (dim 384, vocabulary 4096, 1024 tokens) on one thread: in `bf16` compared
//! with 32 bits, in interleaved pairs.
//!
//! ```text
//! cargo bench -p burn-fsdp-kernels --bench products -- [--pairs N]
//! ```

use std::time::Instant;

use burn::tensor::{DType, Shape, TensorData};
use burn_flex::FlexTensor;
use burn_fsdp_kernels::FusedOperation;
use burn_ir::{CustomOpIr, TensorId, TensorIr};

/// Rows, addends and columns of the products in forward.
const SHAPES: [[usize; 3]; 5] = [
    [1024, 384, 1152],
    [1024, 384, 384],
    [1024, 384, 1536],
    [1024, 1536, 384],
    [1024, 384, 4096],
];

fn tensor(shape: [usize; 2], dtype: DType) -> FlexTensor {
    let value = |at: usize| ((at * 7919 % 1013) as f32 - 506.0) / 307.0;
    let values: Vec<f32> = (0..shape[0] * shape[1]).map(value).collect();
    let data = TensorData::new(values, shape.to_vec());
    FlexTensor::from_data(data.convert_dtype(dtype))
}

/// Returns the seconds of one product.
fn seconds(lhs: &FlexTensor, rhs: &FlexTensor) -> f64 {
    let [rows, columns] = [lhs.layout().shape()[0], rhs.layout().shape()[1]];
    let out = TensorIr::uninit(TensorId::new(0), Shape::from([rows, columns]), lhs.dtype());
    let operation = FusedOperation::Matmul;
    let call = CustomOpIr::with_scalars(operation.name(), &[], &[out], Vec::new());
    let inputs = vec![lhs.clone(), rhs.clone()];
    let begun = Instant::now();
    std::hint::black_box(operation.run(&call, inputs));
    begun.elapsed().as_secs_f64()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let mut arguments = std::env::args().skip_while(|word| word != "--pairs");
    let pairs = arguments.nth(1).and_then(|number| number.parse().ok());
    let pairs: usize = pairs.unwrap_or(24).max(1);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build();
    let pool = pool.expect("a pool of one thread can be built");
    let mut totals = [0.0; 2];
    for [m, k, n] in SHAPES {
        // The product in forward, and the gradients of the input and of the weight.
        for (name, [rows, addends, columns]) in [
            ("forward", [m, k, n]),
            ("input", [m, n, k]),
            ("weight", [k, m, n]),
        ] {
            let operands = |dtype| {
                let lhs = match name {
                    "weight" => tensor([addends, rows], dtype).transpose(0, 1),
                    _ => tensor([rows, addends], dtype),
                };
                let rhs = match name {
                    "input" => tensor([columns, addends], dtype).transpose(0, 1),
                    _ => tensor([addends, columns], dtype),
                };
                [lhs, rhs]
            };
            let sides = [DType::F32, DType::BF16].map(operands);
            let mut times = [Vec::new(), Vec::new()];
            pool.install(|| {
                for pair in 0..=pairs {
                    for side in [pair % 2, 1 - pair % 2] {
                        let [lhs, rhs] = &sides[side];
                        let time = seconds(lhs, rhs);
                        // The first pair also measures which method is the fastest.
                        if pair > 0 {
                            times[side].push(time);
                        }
                    }
                }
            });
            let [full, halves] = times;
            let ratio = median(halves.iter().zip(&full).map(|(a, b)| a / b).collect());
            let [full, halves] = [full, halves].map(median);
            totals[0] += full;
            totals[1] += halves;
            let rate = |time: f64| 2.0 * (m * k * n) as f64 / time / 1e9;
            println!(
                "{m:5} {k:5} {n:5} {name:8} f32 {:6.1} GFLOP/s, bf16 {:6.1} GFLOP/s, time {ratio:.3}",
                rate(full),
                rate(halves)
            );
        }
    }
    println!("all: bf16 takes {:.3} of the time", totals[1] / totals[0]);
}
