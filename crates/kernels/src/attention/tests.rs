//! Tests of masked attention against the composed attention in 64 bits: values and gradients.

use burn::tensor::activation::softmax;
use burn::tensor::{Bool, DType, Device, Tensor, TensorData};
use burn_flex::FlexTensor;

use super::cpu::{Weighting, weighted, weighted_gradients};
use super::factors::Factors;
use super::mask::Fill;
use crate::rows::contiguous;

/// Batch, heads, queries, keys, width, width of values.
type Sizes = [usize; 6];

const SIZES: [Sizes; 6] = [
    [2, 3, 5, 5, 4, 4],
    [1, 2, 70, 130, 3, 5],
    [2, 1, 65, 64, 8, 8],
    [2, 2, 130, 40, 4, 2],
    [1, 1, 1, 1, 1, 1],
    [1, 2, 129, 129, 2, 3],
];

const SCALE: f32 = 0.37;

#[derive(Clone)]
struct Case {
    sizes: Sizes,
    /// Elements of queries, keys, values and the gradient of the result.
    parts: [Vec<f32>; 4],
    /// Elements, shape and number of each mask.
    fills: Vec<(Vec<bool>, [usize; 4], f32)>,
    /// Factors that multiply the probabilities, if any.
    factors: Option<Vec<f32>>,
}

/// The factor that multiplies all probabilities, in addition to each one's factor.
const KEPT: f32 = 1.25;

impl Case {
    fn new(sizes: Sizes) -> Self {
        let [batch, heads, queries, keys, width, values] = sizes;
        let lens = [
            queries * width,
            keys * width,
            keys * values,
            queries * values,
        ];
        let mut number = 0_usize;
        let parts = lens.map(|len| {
            let next = |_| {
                number += 1;
                ((number * 7919 % 1013) as f32 - 506.0) / 350.0
            };
            (0..batch * heads * len).map(next).collect()
        });
        Self {
            sizes,
            parts,
            fills: Vec::new(),
            factors: None,
        }
    }

    /// Drops some probabilities and changes others.
    fn multiplied(mut self) -> Self {
        let [batch, heads, queries, keys, ..] = self.sizes;
        let factor = |at: usize| [0.0, 1.0, 1.0, -0.5, 0.0][at * 31 % 5];
        let all = 0..batch * heads * queries * keys;
        self.factors = Some(all.map(factor).collect());
        self
    }

    fn fill(mut self, shape: [bool; 4], value: f32, is_set: impl Fn([usize; 4]) -> bool) -> Self {
        let [batch, heads, queries, keys, ..] = self.sizes;
        let full = [batch, heads, queries, keys];
        let dims: [usize; 4] = std::array::from_fn(|dim| if shape[dim] { full[dim] } else { 1 });
        let all = (0..dims.iter().product()).map(|mut index| {
            let mut at = [0; 4];
            for dim in (0..4).rev() {
                at[dim] = index % dims[dim];
                index /= dims[dim];
            }
            is_set(at)
        });
        let all = all.collect();
        self.fills.push((all, dims, value));
        self
    }

    /// Shapes of queries, keys, values and the result, heads before time.
    fn shapes(&self) -> [[usize; 4]; 4] {
        let [batch, heads, queries, keys, width, values] = self.sizes;
        [
            [batch, heads, queries, width],
            [batch, heads, keys, width],
            [batch, heads, keys, values],
            [batch, heads, queries, values],
        ]
    }

    /// Computes the reference result and gradients with Burn's own operations in 64 bits. Heads come before time.
    fn composed(&self) -> [Vec<f32>; 4] {
        let device = Device::flex().autodiff();
        let shapes = self.shapes();
        let tensor = |index: usize| {
            let data = TensorData::new(self.parts[index].clone(), shapes[index]);
            Tensor::<4>::from_data(data, (&device, DType::F64))
        };
        let [q, k, v] = [0, 1, 2].map(|index| tensor(index).require_grad());
        let mut scores = q.clone().matmul(k.clone().transpose()) * f64::from(SCALE);
        for (mask, shape, value) in &self.fills {
            let mask = TensorData::new(mask.clone(), *shape);
            let mask = Tensor::<4, Bool>::from_data(mask, &device);
            scores = scores.mask_fill(mask, *value);
        }
        let mut probabilities = softmax(scores, 3);
        if let Some(factors) = &self.factors {
            let factors = TensorData::new(factors.clone(), probabilities.dims());
            let factors = Tensor::<4>::from_data(factors, (&device, DType::F64));
            probabilities = probabilities * factors * KEPT;
        }
        let result = probabilities.matmul(v.clone());
        let grads = (result.clone() * tensor(3)).sum().backward();
        let floats = |tensor: Tensor<4>| tensor.cast(DType::F32).into_data().try_to_vec().unwrap();
        let of = |x: &Tensor<4>| floats(x.grad(&grads).unwrap());
        [floats(result.inner()), of(&q), of(&k), of(&v)]
    }

    /// Computes the result and gradients with the kernels. The operands are views, heads before time in memory.
    fn fused(&self) -> [Vec<f32>; 4] {
        let shapes = self.shapes();
        let tensor = |index: usize| {
            let data = TensorData::new(self.parts[index].clone(), shapes[index]);
            FlexTensor::from_data(data).transpose(1, 2)
        };
        let [batch, heads, queries, keys, ..] = self.sizes;
        let weighting = || {
            let fill = |(mask, shape, value): &(Vec<bool>, [usize; 4], f32)| Fill {
                mask: FlexTensor::from_data(TensorData::new(mask.clone(), *shape)),
                value: *value,
            };
            let factors = self.factors.as_ref().map(|factors| {
                let shape = [batch, heads, queries, keys];
                FlexTensor::from_data(TensorData::new(factors.clone(), shape))
            });
            Weighting {
                scale: SCALE,
                fills: self.fills.iter().map(fill).collect(),
                factors: factors.map(|factors| Factors::new(factors, KEPT)),
            }
        };
        let operands = || [tensor(0), tensor(1), tensor(2)];
        let floats = |tensor: FlexTensor| {
            let turned = tensor.transpose(1, 2).to_contiguous();
            turned.into_data().try_to_vec().unwrap()
        };
        let result = weighted(operands(), weighting());
        // Again with contiguous operands, as in a step, for which masked keys may be omitted.
        let again = weighted(operands().map(contiguous), weighting());
        assert_eq!(floats(result.clone()).len(), floats(again.clone()).len());
        assert_near("in order", &floats(again), &floats(result.clone()));
        let in_order = || operands().map(contiguous);
        let grad = contiguous(tensor(3));
        let [q, k, v] = weighted_gradients(in_order(), &grad, weighting());
        let of_views = weighted_gradients(operands(), &tensor(3), weighting());
        for (view, ordered) in of_views.into_iter().zip([&q, &k, &v]) {
            assert_near("views", &floats(view), &floats(ordered.clone()));
        }
        [result, q, k, v].map(floats)
    }

    #[track_caller]
    fn check(&self, what: &str) {
        let names = ["result", "queries", "keys", "values"];
        let both = self.fused().into_iter().zip(self.composed());
        for (name, (found, expected)) in names.into_iter().zip(both) {
            assert_near(
                &format!("{what} of {:?}, {name}", self.sizes),
                &found,
                &expected,
            );
        }
    }
}

#[track_caller]
fn assert_near(what: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    // The tolerance of huge numbers, which come from a huge operand, is relative to themselves; for others it is
    // relative to the largest ordinary number.
    let ordinary = expected.iter().filter(|x| x.abs() < 1e20);
    let largest = ordinary.fold(1.0f32, |most, x| most.max(x.abs()));
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        let is_same = found == expected || found.is_nan() && expected.is_nan();
        let scale = if expected.abs() < 1e20 {
            largest
        } else {
            expected.abs()
        };
        let is_close = (found - expected).abs() <= 5e-6 * scale;
        assert!(
            is_same || is_close,
            "{what} at {index}: {found} is not {expected}"
        );
    }
}

#[test]
fn attention_matches_the_composed_one_under_any_mask() {
    for sizes in SIZES {
        let [batch, heads, queries, keys, ..] = sizes;
        let case = || Case::new(sizes);
        case().check("no mask");
        case().multiplied().check("no mask, multiplied");
        for value in [-1e4, f32::NEG_INFINITY, -1.0, 3.0, f32::NAN] {
            let all = [true; 4];
            let causal = |[_, _, query, key]: [usize; 4]| key > query;
            let seen = case().fill([true, false, true, true], value, causal);
            seen.check(&format!("causal, {value}"));
            seen.multiplied()
                .check(&format!("causal, {value}, multiplied"));
            let pad = |[batch, _, _, key]: [usize; 4]| key + 1 + 2 * batch >= keys && key > 0;
            let padded = case().fill([true, false, false, true], value, pad);
            padded.clone().check(&format!("padding, {value}"));
            padded
                .fill([false, false, true, true], value * 0.5, causal)
                .check(&format!("padding and causal, {value}"));
            let band = |[_, head, query, key]: [usize; 4]| key > query + head || key + 3 < query;
            case()
                .fill([false, true, true, true], value, band)
                .check(&format!("a band for each head, {value}"));
            let rows = |[_, _, query, _]: [usize; 4]| query % 7 == 3 || query + 1 == queries;
            case()
                .fill([false, false, true, false], value, rows)
                .check(&format!("queries that see nothing, {value}"));
            let some =
                |[b, h, query, key]: [usize; 4]| (b + h * heads + query * 5 + key * 3) % 4 == batch;
            let any = case().fill(all, value, some);
            any.check(&format!("any, {value}"));
            any.multiplied().check(&format!("any, {value}, multiplied"));
        }
    }
}

#[test]
fn masked_non_finite_scores_match_the_composed_attention() {
    for sizes in [[2, 1, 70, 70, 3, 3], [1, 2, 6, 9, 4, 2]] {
        let [_, _, queries, keys, ..] = sizes;
        for special in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e30] {
            for part in 0..4 {
                for value in [-1e4, f32::NEG_INFINITY] {
                    let mut case = Case::new(sizes);
                    // The last row of the part, which most queries do not attend to.
                    let len = case.parts[part].len();
                    case.parts[part][len - 1] = special;
                    let causal = move |[_, _, query, key]: [usize; 4]| key * queries > query * keys;
                    let case = case.fill([true, false, true, true], value, causal);
                    case.check(&format!("{special} in part {part}, filled with {value}"));
                    case.multiplied()
                        .check(&format!("{special} in part {part}, {value}, multiplied"));
                }
            }
            let causal = move |[_, _, query, key]: [usize; 4]| key * queries > query * keys;
            let mut case = Case::new(sizes)
                .fill([true, false, true, true], -1e4, causal)
                .multiplied();
            // The factor of the last key for the first query, which does not attend to it.
            case.factors.as_mut().unwrap()[keys - 1] = special;
            case.check(&format!("{special} as a factor"));
        }
    }
}

#[test]
fn scores_far_below_the_mask_value_still_count() {
    // All keys that a query attends to have scores of -3e4, so masked keys at -1e4 win.
    let sizes = [1, 1, 3, 5, 1, 2];
    let mut case = Case::new(sizes);
    case.parts[0].fill(300.0);
    case.parts[1].fill(-300.0);
    let causal = |[_, _, query, key]: [usize; 4]| key > query;
    case.fill([true, false, true, true], -1e4, causal)
        .check("scores below the fill");
}
