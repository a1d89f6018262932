//! The contributions of gradients to a norm. Those of a device are computed there, and only three numbers of each are read
//! back, in one copy.

use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_fsdp_mesh::Measure;
use burn_fsdp_tensors::{self as tensors, is_host};

use super::gradients::Entry;

/// Numbers that are read back for each gradient.
const NUMBERS: usize = 3;

/// Returns the contribution of each gradient's elements on this rank.
///
/// On the host, they are computed in 64 bits, and on a device in the gradient's type, at least 32 bits. The sums there are of
/// the elements divided by the largest, so they do not overflow. Different devices may round differently.
pub(super) fn contributions(measure: Measure, entries: &[Entry]) -> Vec<f64> {
    let mut contributions: Vec<f64> = vec![0.0; entries.len()];
    // Of each device in turn, the positions of its gradients and their numbers.
    let mut elsewhere: Vec<(Device, Vec<usize>, Vec<Tensor<1>>)> = Vec::new();
    for (index, entry) in entries.iter().enumerate() {
        let device = entry.flat.device();
        if is_host(&device) || entry.flat.dims() == [0] {
            contributions[index] = on_host(measure, &entry.flat);
            continue;
        }
        let numbers = on_device(measure, &entry.flat);
        match elsewhere.iter_mut().find(|(known, ..)| *known == device) {
            Some((_, places, all)) => {
                places.push(index);
                all.push(numbers);
            }
            None => elsewhere.push((device, vec![index], vec![numbers])),
        }
    }
    for (_, places, numbers) in elsewhere {
        let read: Vec<f64> = Tensor::cat(numbers, 0).into_data().iter().collect();
        for (index, numbers) in places.into_iter().zip(read.chunks(NUMBERS)) {
            contributions[index] = match numbers {
                [largest, sum, nonfinite] if *nonfinite == 0.0 => joined(measure, *largest, *sum),
                _ => on_host(measure, &entries[index].flat),
            };
        }
    }
    contributions
}

/// Returns a tensor of at least 32 bits.
fn widened(flat: &Tensor<1>) -> Tensor<1> {
    match flat.dtype() {
        DType::F32 | DType::F64 => flat.clone(),
        _ => flat.clone().cast(FloatDType::F32),
    }
}

fn on_host(measure: Measure, flat: &Tensor<1>) -> f64 {
    let flat = widened(flat);
    let is_double = flat.dtype() == DType::F64;
    let source = tensors::source(flat, None);
    if is_double {
        measure.of_f64(source.as_bytes())
    } else {
        measure.of_f32(source.as_bytes())
    }
}

/// Returns the largest absolute value, the sum of the measure's powers of all values divided by it, and a number above 0
/// if a value is not finite.
fn on_device(measure: Measure, flat: &Tensor<1>) -> Tensor<1> {
    let flat = widened(flat);
    let dtype = FloatDType::from(flat.dtype());
    let nonfinite = flat.clone().is_finite().bool_not().float();
    let nonfinite = folded(nonfinite, |rows| rows.max_dim(1));
    let sizes = flat.abs();
    let largest = folded(sizes.clone(), |rows| rows.max_dim(1));
    let ratios = sizes / largest.clone().clamp_min(f32::MIN_POSITIVE);
    let sum_of = |terms| folded(terms, |rows| rows.sum_dim(1));
    let sum = match measure {
        Measure::Absolute => sum_of(ratios),
        Measure::Square => sum_of(ratios.clone() * ratios),
        Measure::Power(p) => sum_of(ratios.powf_scalar(p)),
        Measure::Largest => largest.clone(),
    };
    Tensor::cat(vec![largest, sum, nonfinite.cast(dtype)], 0)
}

/// Combines all elements into one, row by row. Burn's own reductions of a whole tensor use few of a GPU's threads, or add
/// in an order that changes.
fn folded(mut flat: Tensor<1>, fold: impl Fn(Tensor<2>) -> Tensor<2>) -> Tensor<1> {
    const COLUMNS: usize = 1024;
    loop {
        let [len] = flat.dims();
        if len == 1 {
            return flat;
        }
        let columns = len.min(COLUMNS);
        let rows = len / columns;
        let rest = len - rows * columns;
        let folded = |part: Tensor<1>, [rows, columns]: [usize; 2]| {
            fold(part.reshape([rows, columns])).reshape([rows])
        };
        flat = if rest == 0 {
            folded(flat, [rows, columns])
        } else {
            let whole = flat.clone().slice(0..rows * columns);
            let rest_of = flat.slice(rows * columns..len);
            let parts = [folded(whole, [rows, columns]), folded(rest_of, [1, rest])];
            Tensor::cat(parts.into(), 0)
        };
    }
}

/// Returns the contribution that [`on_device`]'s first two numbers describe.
fn joined(measure: Measure, largest: f64, sum: f64) -> f64 {
    let divisor = largest.max(f64::from(f32::MIN_POSITIVE));
    match measure {
        Measure::Absolute => divisor * sum,
        Measure::Square => divisor * divisor * sum,
        Measure::Power(p) => divisor.powf(p) * sum,
        Measure::Largest => largest,
    }
}

#[cfg(test)]
mod tests {
    use burn_fsdp_mesh::Norm;

    use super::*;

    /// The numbers of a device, computed on the CPU, have the value that the host computes.
    #[test]
    fn both_ways_compute_the_same() {
        let device = Device::flex();
        let values: Vec<f32> = (0..1001).map(|i| (i as f32 - 300.0) * 0.37).collect();
        let cases = [
            values,
            vec![0.0; 5],
            vec![1e30, -3e30],
            vec![1e-30, 2e-30],
            vec![1e-40, 3e-40],
            vec![0.25; 3 * 1024 * 1024 + 7],
        ];
        for values in cases {
            let flat = Tensor::<1>::from_floats(values.as_slice(), &device);
            for norm in [Norm::P(1.0), Norm::P(2.0), Norm::P(3.5), Norm::Infinity] {
                let measure = Measure::new(norm).expect("a norm");
                let numbers: Vec<f64> = on_device(measure, &flat).into_data().iter().collect();
                let (own, host) = (
                    joined(measure, numbers[0], numbers[1]),
                    on_host(measure, &flat),
                );
                assert!((own - host).abs() <= 1e-5 * host, "{norm:?}: {own}, {host}");
                assert_eq!(numbers[2], 0.0);
            }
        }
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let flat = Tensor::<1>::from_floats([1.0, value, 2.0], &device);
            let numbers: Vec<f64> = on_device(Measure::Square, &flat)
                .into_data()
                .iter()
                .collect();
            assert_eq!(numbers[2], 1.0, "{value}");
        }
    }
}
