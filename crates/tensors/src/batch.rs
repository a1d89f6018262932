//! Nests of tensors, such as batches.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Display;
use std::hash::{BuildHasher, Hash};

use burn::tensor::{Bool, DType, Device, Int, Tensor};

/// A nest of tensors: what a loss closure receives in addition to the model, or a recomputed region receives and
/// returns.
///
/// It is implemented for tensors and for tuples, arrays, vectors, options, boxes and maps of batches, nested in any
/// way. Implement it for a struct by mapping its fields in a fixed order. A map's values are visited in the order of
/// their keys. In compiled steps, each length of a vector, each set of keys of a map, and the presence or absence of an
/// option gets its own graph.
///
/// Fields that are not tensors are frozen into a compiled graph with their values in the traced batch, unless they are
/// named with [`BatchMapper::fixed`]:
///
/// ```
/// use burn::tensor::{Int, Tensor};
/// use burn_fsdp_tensors::{Batch, BatchMapper};
///
/// #[derive(Clone)]
/// struct Labelled {
///     images: Tensor<4>,
///     labels: Tensor<1, Int>,
///     num_classes: usize,
/// }
///
/// impl Batch for Labelled {
///     fn map(self, mapper: &mut impl BatchMapper) -> Self {
///         mapper.fixed("num_classes", &self.num_classes);
///         Self {
///             images: mapper.float("images", self.images),
///             labels: mapper.int("labels", self.labels),
///             ..self
///         }
///     }
/// }
/// ```
pub trait Batch: Clone + 'static {
    /// Passes every tensor to the mapper, always in the same order and under the same names, and returns the batch of
    /// the mapped tensors.
    fn map(self, mapper: &mut impl BatchMapper) -> Self;
}

/// Maps each tensor of a batch; see [`Batch::map`].
pub trait BatchMapper {
    /// Maps a float tensor with this name.
    fn float<const D: usize>(&mut self, name: &str, tensor: Tensor<D>) -> Tensor<D>;
    /// Maps an int tensor with this name.
    fn int<const D: usize>(&mut self, name: &str, tensor: Tensor<D, Int>) -> Tensor<D, Int>;
    /// Maps a bool tensor with this name.
    fn bool<const D: usize>(&mut self, name: &str, tensor: Tensor<D, Bool>) -> Tensor<D, Bool>;
    /// Records a value with this name that is not a tensor, such as a length or a flag. Each distinct value gets its
    /// own graph. Pass a value that changes in every step, such as a learning rate, as a tensor instead.
    fn fixed(&mut self, name: &str, value: &impl Hash);
    /// Enters the part of the batch with this name. Names inside it are reported as `name.inner`.
    fn enter(&mut self, name: &str);
    /// Leaves the part that was entered last.
    fn exit(&mut self);
}

impl<const D: usize> Batch for Tensor<D> {
    fn map(self, mapper: &mut impl BatchMapper) -> Self {
        mapper.float("", self)
    }
}

impl<const D: usize> Batch for Tensor<D, Int> {
    fn map(self, mapper: &mut impl BatchMapper) -> Self {
        mapper.int("", self)
    }
}

impl<const D: usize> Batch for Tensor<D, Bool> {
    fn map(self, mapper: &mut impl BatchMapper) -> Self {
        mapper.bool("", self)
    }
}

impl Batch for () {
    fn map(self, _: &mut impl BatchMapper) -> Self {}
}

impl<B: Batch, const N: usize> Batch for [B; N] {
    fn map(self, mapper: &mut impl BatchMapper) -> Self {
        let mut index = 0;
        self.map(|part| {
            index += 1;
            mapped(&(index - 1).to_string(), part, mapper)
        })
    }
}

impl<B: Batch> Batch for Box<B> {
    fn map(self, mapper: &mut impl BatchMapper) -> Self {
        Self::new((*self).map(mapper))
    }
}

impl<B: Batch> Batch for Option<B> {
    fn map(self, mapper: &mut impl BatchMapper) -> Self {
        mapper.fixed("is_some", &self.is_some());
        self.map(|part| part.map(mapper))
    }
}

impl<B: Batch> Batch for Vec<B> {
    fn map(self, mapper: &mut impl BatchMapper) -> Self {
        mapper.fixed("len", &self.len());
        let parts = self.into_iter().enumerate();
        let parts = parts.map(|(index, part)| mapped(&index.to_string(), part, mapper));
        parts.collect()
    }
}

impl<K, B> Batch for BTreeMap<K, B>
where
    K: Clone + Ord + Hash + Display + 'static,
    B: Batch,
{
    fn map(self, mapper: &mut impl BatchMapper) -> Self {
        let keys: Vec<_> = self.keys().collect();
        mapper.fixed("keys", &keys);
        let parts = self.into_iter().map(|(key, part)| {
            let part = mapped(&key.to_string(), part, mapper);
            (key, part)
        });
        parts.collect()
    }
}

impl<K, B, S> Batch for HashMap<K, B, S>
where
    K: Clone + Ord + Hash + Display + 'static,
    B: Batch,
    S: BuildHasher + Clone + Default + 'static,
{
    fn map(self, mapper: &mut impl BatchMapper) -> Self {
        let sorted: BTreeMap<K, B> = self.into_iter().collect();
        Batch::map(sorted, mapper).into_iter().collect()
    }
}

/// Maps a part under its name.
fn mapped<B: Batch>(name: &str, part: B, mapper: &mut impl BatchMapper) -> B {
    mapper.enter(name);
    let part = part.map(mapper);
    mapper.exit();
    part
}

/// Maps the float tensors of a batch; see [`map_floats`].
pub trait FloatMapper {
    /// Maps a float tensor.
    fn float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D>;
}

/// Maps the float tensors of a batch, in the order of [`Batch::map`]. Other tensors stay unchanged.
pub fn map_floats<B: Batch>(nest: B, mapper: &mut impl FloatMapper) -> B {
    struct Floats<'a, M>(&'a mut M);
    impl<M: FloatMapper> BatchMapper for Floats<'_, M> {
        fn float<const D: usize>(&mut self, _: &str, tensor: Tensor<D>) -> Tensor<D> {
            self.0.float(tensor)
        }
        fn int<const D: usize>(&mut self, _: &str, tensor: Tensor<D, Int>) -> Tensor<D, Int> {
            tensor
        }
        fn bool<const D: usize>(&mut self, _: &str, tensor: Tensor<D, Bool>) -> Tensor<D, Bool> {
            tensor
        }
        fn fixed(&mut self, _: &str, _: &impl Hash) {}
        fn enter(&mut self, _: &str) {}
        fn exit(&mut self) {}
    }
    nest.map(&mut Floats(mapper))
}

/// Moves the tensors of a batch to a device.
pub fn moved_to<B: Batch>(nest: B, device: &Device) -> B {
    struct Move<'a>(&'a Device);
    impl BatchMapper for Move<'_> {
        fn float<const D: usize>(&mut self, _: &str, tensor: Tensor<D>) -> Tensor<D> {
            tensor.to_device(self.0)
        }
        fn int<const D: usize>(&mut self, _: &str, tensor: Tensor<D, Int>) -> Tensor<D, Int> {
            tensor.to_device(self.0)
        }
        fn bool<const D: usize>(&mut self, _: &str, tensor: Tensor<D, Bool>) -> Tensor<D, Bool> {
            if tensor.device() == *self.0 {
                return tensor;
            }
            // Backends store booleans in different types, which Burn's `to_device` does not convert.
            Tensor::from_data(tensor.into_data(), self.0)
        }
        fn fixed(&mut self, _: &str, _: &impl Hash) {}
        fn enter(&mut self, _: &str) {}
        fn exit(&mut self) {}
    }
    nest.map(&mut Move(device))
}

/// Casts the float tensors of a batch to another type. Other tensors stay unchanged.
///
/// ```
/// use burn::tensor::{DType, Device, Int, Tensor};
/// use burn_fsdp_tensors::cast_floats;
///
/// let device = Device::flex();
/// let tokens = Tensor::<2, Int>::zeros([2, 3], &device);
/// let integers = tokens.dtype();
/// let images = vec![Some(Tensor::<4>::ones([2, 3, 4, 4], &device)), None];
/// let (tokens, images) = cast_floats((tokens, images), DType::BF16);
/// assert_eq!(tokens.dtype(), integers);
/// assert_eq!(images[0].as_ref().map(Tensor::dtype), Some(DType::BF16));
/// ```
pub fn cast_floats<B: Batch>(nest: B, dtype: DType) -> B {
    struct Cast(DType);
    impl FloatMapper for Cast {
        fn float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
            if tensor.dtype() == self.0 {
                tensor
            } else {
                tensor.cast(self.0)
            }
        }
    }
    map_floats(nest, &mut Cast(dtype))
}

macro_rules! tuple_batch {
    ($($name:ident $index:literal),+) => {
        impl<$($name: Batch),+> Batch for ($($name,)+) {
            fn map(self, mapper: &mut impl BatchMapper) -> Self {
                #[allow(non_snake_case, reason = "the type parameters name the parts")]
                let ($($name,)+) = self;
                ($(mapped($index, $name, mapper),)+)
            }
        }
    };
}

tuple_batch!(A "0");
tuple_batch!(A "0", B "1");
tuple_batch!(A "0", B "1", C "2");
tuple_batch!(A "0", B "1", C "2", E "3");
tuple_batch!(A "0", B "1", C "2", E "3", F "4");
tuple_batch!(A "0", B "1", C "2", E "3", F "4", G "5");
tuple_batch!(A "0", B "1", C "2", E "3", F "4", G "5", H "6");
tuple_batch!(A "0", B "1", C "2", E "3", F "4", G "5", H "6", I "7");
