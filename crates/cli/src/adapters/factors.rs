//! The values of adapters' factors, in the memory of one process.

use std::collections::BTreeMap;
use std::ops::Range;

use burn::tensor::{Device, Tensor, TensorData};
use burn_fsdp::internals::checkpoint::Step;
use burn_fsdp::internals::mesh::Region;
use burn_fsdp_models::ModelConfig;

use super::sizes::{AdapterSizes, matrices_of};
use crate::error::InputError;

/// The factors `a` of shape `[in, rank]` and `b` of shape `[rank, out]`, by the path of their matrix. They have 32 bits.
#[derive(Debug)]
pub(crate) struct Factors(pub(super) BTreeMap<String, [TensorData; 2]>);

impl Factors {
    /// Reads all factors of a step.
    pub(crate) fn of_step(step: &Step) -> Result<Self, InputError> {
        let mut of_matrices = BTreeMap::new();
        let first_factors = step.index().tensors.iter().filter_map(|tensor| {
            let path = tensor.name.strip_suffix(".lora.a")?;
            tensor.kind.is_model().then_some(path)
        });
        for path in first_factors {
            let factor = |name: &str| -> Result<TensorData, InputError> {
                let name = format!("{path}.lora.{name}");
                let shape = step.tensor(&name)?.shape.clone();
                let whole = Region::Flat(0..shape.iter().product());
                let bytes = step.read(&name, &whole)?;
                let values = bytes.chunks_exact(4).map(|bytes| {
                    let bytes = bytes.try_into().unwrap_or_default();
                    f32::from_ne_bytes(bytes)
                });
                Ok(TensorData::new(values.collect::<Vec<_>>(), shape))
            };
            of_matrices.insert(path.to_owned(), [factor("a")?, factor("b")?]);
        }
        Ok(Self(of_matrices))
    }

    /// Returns true if exactly the adapted matrices have factors, whose shapes are those of `sizes` and the model.
    pub(crate) fn fit(&self, sizes: &AdapterSizes, model: &ModelConfig) -> bool {
        let all = matrices_of(model).unwrap_or_default();
        let mut number = 0;
        let fit = all.iter().all(|spec| {
            let (own, factors) = (sizes.of(&spec.path), self.0.get(&spec.path));
            number += usize::from(factors.is_some());
            match (own, factors, &spec.module_shape()[..]) {
                (None, None, _) => true,
                (Some(own), Some([a, b]), &[rows, columns]) => {
                    let (a, b) = (&a.shape()[..], &b.shape()[..]);
                    a == [rows, own.rank] && b == [own.rank, columns]
                }
                _ => false,
            }
        });
        fit && number == self.0.len()
    }

    /// Returns elements of the factor at `path`, such as `layers.0.attention.query.weight.lora.a`.
    pub(crate) fn part(&self, path: &str, range: Range<usize>) -> Option<Vec<f32>> {
        let (matrix, name) = path.split_once(".lora.")?;
        let [a, b] = self.0.get(matrix)?;
        let factor = if name == "a" { a } else { b };
        Some(factor.as_slice::<f32>().ok()?.get(range)?.to_vec())
    }

    /// Returns the product of the factors of the matrix at `path`, if it has any.
    pub(crate) fn product(&self, path: &str) -> Option<Tensor<2>> {
        let [a, b] = self.0.get(path)?;
        let matrix = |data: &TensorData| Tensor::<2>::from_data(data.clone(), &Device::flex());
        Some(matrix(a).matmul(matrix(b)))
    }
}
