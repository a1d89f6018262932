//! The values of adapters, in the memory of one process.

use std::collections::BTreeMap;
use std::ops::Range;

use burn::tensor::{Device, Tensor, TensorData};
use burn_fsdp::internals::checkpoint::Step;
use burn_fsdp::internals::mesh::Region;
use burn_fsdp_models::{Architecture, ModelConfig, ModelError, WeightsFile};

use super::sizes::{AdapterSizes, Method, matrices_of};
use crate::error::InputError;

/// The end of the path of an adapter's magnitudes.
const MAGNITUDE: &str = ".lora.magnitude";

/// The adapters of a model, by the path of their matrix.
#[derive(Debug)]
pub(crate) struct Factors(pub(super) BTreeMap<String, Values>);

/// The values of an adapter. They have 32 bits.
#[derive(Debug)]
pub(super) struct Values {
    /// The factor of shape `[in, rank]`.
    pub(super) a: TensorData,
    /// The factor of shape `[rank, out]`.
    pub(super) b: TensorData,
    /// The norms of the matrix's columns, with DoRA.
    pub(super) magnitude: Option<TensorData>,
}

impl Factors {
    /// Reads all adapters of a step.
    pub(crate) fn of_step(step: &Step) -> Result<Self, InputError> {
        let read = |name: &str| -> Result<TensorData, InputError> {
            let shape = step.tensor(name)?.shape.clone();
            let whole = Region::Flat(0..shape.iter().product());
            let bytes = step.read(name, &whole)?;
            let values = bytes.chunks_exact(4).map(|bytes| {
                let bytes = bytes.try_into().unwrap_or_default();
                f32::from_ne_bytes(bytes)
            });
            Ok(TensorData::new(values.collect::<Vec<_>>(), shape))
        };
        let tensors = || {
            step.index()
                .tensors
                .iter()
                .filter(|tensor| tensor.kind.is_model())
        };
        let mut of_matrices = BTreeMap::new();
        for path in tensors().filter_map(|tensor| tensor.name.strip_suffix(".lora.a")) {
            let magnitude = format!("{path}{MAGNITUDE}");
            let has_magnitude = tensors().any(|tensor| tensor.name == magnitude);
            let values = Values {
                a: read(&format!("{path}.lora.a"))?,
                b: read(&format!("{path}.lora.b"))?,
                magnitude: has_magnitude.then(|| read(&magnitude)).transpose()?,
            };
            of_matrices.insert(path.to_owned(), values);
        }
        Ok(Self(of_matrices))
    }

    /// Returns true if exactly the adapted matrices have adapters, whose shapes are those of `sizes` and the model.
    pub(crate) fn fit(&self, sizes: &AdapterSizes, model: &ModelConfig) -> bool {
        let all = matrices_of(model).unwrap_or_default();
        let mut number = 0;
        let fit = all.iter().all(|spec| {
            let (own, values) = (sizes.of(&spec.path), self.0.get(&spec.path));
            number += usize::from(values.is_some());
            match (own, values, &spec.module_shape()[..]) {
                (None, None, _) => true,
                (Some(own), Some(values), &[rows, columns]) => {
                    let (a, b) = (&values.a.shape()[..], &values.b.shape()[..]);
                    let magnitude = values.magnitude.as_ref().map(|data| data.shape().to_vec());
                    let expected = (sizes.method == Method::Dora).then(|| vec![columns]);
                    a == [rows, own.rank] && b == [own.rank, columns] && magnitude == expected
                }
                _ => false,
            }
        });
        fit && number == self.0.len()
    }

    /// Returns elements of the tensor at `path`, such as `layers.0.attention.query.weight.lora.a`.
    pub(crate) fn part(&self, path: &str, range: Range<usize>) -> Option<Vec<f32>> {
        let (matrix, name) = path.split_once(".lora.")?;
        let values = self.0.get(matrix)?;
        let tensor = match name {
            "a" => &values.a,
            "b" => &values.b,
            _ => values.magnitude.as_ref()?,
        };
        Some(tensor.as_slice::<f32>().ok()?.get(range)?.to_vec())
    }

    /// Returns a weight with its adapter, if it has one, as peft merges them: the product is scaled, then added.
    pub(crate) fn merged(&self, path: &str, base: TensorData, scale: f64) -> Option<TensorData> {
        let Values { a, b, magnitude } = self.0.get(path)?;
        let matrix = |data: TensorData| Tensor::<2>::from_data(data, &Device::flex());
        let product = matrix(a.clone()).matmul(matrix(b.clone()));
        let sum = matrix(base) + product.mul_scalar(scale);
        let merged = match magnitude {
            None => sum,
            Some(magnitude) => {
                let columns = sum.dims()[1];
                let magnitude = Tensor::<1>::from_data(magnitude.clone(), &Device::flex());
                let row: Tensor<2> = magnitude.reshape([1, columns]);
                sum.clone() * (row / norms(sum))
            }
        };
        Some(merged.into_data())
    }
}

/// Returns the initial values of magnitudes, if `path` is a path of some: the norms of the columns of the weight in a
/// file. Reads the whole weight.
pub(crate) fn initial_magnitudes<A: Architecture>(
    weights: &WeightsFile<A>,
    path: &str,
    range: Range<usize>,
) -> Result<Option<Vec<f32>>, ModelError> {
    let Some(matrix) = path.strip_suffix(MAGNITUDE) else {
        return Ok(None);
    };
    let specs = weights.config().parameters();
    let Some(spec) = specs.iter().find(|spec| spec.path == matrix) else {
        return Ok(None);
    };
    let shape = spec.module_shape();
    let values = weights.read(matrix, 0..shape.iter().product())?;
    let values = Tensor::<2>::from_data(TensorData::new(values, shape), &Device::flex());
    let norms = norms(values).into_data();
    let norms = norms.as_slice::<f32>().ok();
    Ok(norms.and_then(|norms| Some(norms.get(range)?.to_vec())))
}

/// Returns the norms of a matrix's columns, as a matrix of one row. A norm of zero becomes the smallest positive number.
fn norms(matrix: Tensor<2>) -> Tensor<2> {
    let norms = (matrix.clone() * matrix).sum_dim(0).sqrt();
    norms.add_scalar(f32::MIN_POSITIVE)
}
