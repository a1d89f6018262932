//! The trial that determines, at an optimizer's first step, whether the optimizer may work on shards.
//!
//! Burn does not report optimizer steps: an optimizer is a map over the module like any other, and looks up gradients
//! by id. So [`backward`](crate::backward) adds gradients for small matrices, whole and in two shards, to the module's
//! gradients, under separate ids. There is one matrix for each parameter that optimizers see in parts. A map that
//! reaches such a parameter also visits its matrix and shards, under the parameter's path, so groups by path apply. A
//! map without gradients for them changes nothing. A map that changes a value without a gradient is not an optimizer.
//! An optimizer computes with whole tensors if the shards get different bits from the same elements of the whole
//! matrix. Groups by ids are not tried, because probes have separate ids.

use std::any::Any;
use std::collections::{HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Once;

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Tensor, TensorData};
use parking_lot::Mutex;

use crate::error::Error;
use crate::report;
use crate::shown::Shown;
use crate::thrown::throw;

/// Number of rows and of columns of the probe matrix. Half of the matrix fills whole vector registers on any processor,
/// so equal arithmetic gives equal bits.
pub(crate) const SIDE: usize = 16;
pub(crate) const LEN: usize = SIDE * SIDE;

/// Returns element `i` of the matrix or of its gradient in a step. Elements have either sign and are never zero, and
/// rows and columns have different magnitudes.
pub(crate) fn element(i: usize, step: usize) -> f32 {
    let (row, column) = (i / SIDE, i % SIDE);
    let sign = if (i * 7 + step * 3) % 5 < 2 {
        -1.0
    } else {
        1.0
    };
    sign * (1.0 + row as f32) * (0.3 + ((column * 5 + step) % 7) as f32) / 40.0
}

/// Returns a tensor whose elements are `element(0)`, `element(1)` and so on, in row-major order.
pub(crate) fn tensor_of<const D: usize>(
    shape: [usize; D],
    element: impl Fn(usize) -> f32,
    device: &Device,
    dtype: DType,
) -> Tensor<D> {
    let len = shape.iter().product();
    let values: Vec<f32> = (0..len).map(element).collect();
    Tensor::from_data(TensorData::new(values, shape), (device, dtype))
}

/// The first id of the probes.
const RESERVED: u64 = 0x9b05_688c_2b3e_6c00;
/// Number of bits that determine a parameter's probe ids: few enough that a random id is almost never a probe's, and
/// enough that two parameters of a model almost never share probe ids.
const PLACE_BITS: u32 = 28;
/// Number of ids for the probes of one parameter: half for parameters that are cut, half for those that are only
/// flattened.
const STRIDE: u64 = 16;
/// The magnitude of the probes' values: small, so a small step shows even in a 16-bit type.
const VALUE: f32 = 1.0 / 64.0;

/// Magnitudes of gradients within a row. Adam divides by the magnitude, so clipping shows only near its epsilon. Lion
/// takes the sign, so clipping shows only if it reduces a gradient to zero.
const SIZES: [f32; 8] = [1.0, 1e-2, 1e-4, 1e-6, 1e-8, 1e-12, 1e-24, 1e-36];

/// Returns element `i` of a gradient of the matrix in a step. Its halves have very different magnitudes. The norm of
/// the matrix equals the norm of its first half: above any sensible threshold for clipping by norm, with a finite
/// square. So clipping scales the second half by a small factor as part of the matrix, and hardly at all as a separate
/// tensor.
pub(crate) fn gradient_of_halves(dtype: DType, i: usize, step: usize) -> f32 {
    let scale = match dtype {
        _ if i >= LEN / 2 => 1.0,
        DType::F16 => 64.0,
        _ => 1e17,
    };
    scale * SIZES[i % SIZES.len()] * element(i, step)
}

/// Returns true if `id` belongs to a probe of an optimizer's trial, not to a parameter. After an optimizer's first
/// step, its records contain states with such ids, which can be dropped.
pub fn is_probe(id: ParamId) -> bool {
    (RESERVED..RESERVED + (STRIDE << PLACE_BITS)).contains(&id.val())
}

/// Returns the number that determines a parameter's probe ids. It is the same in every process, so a record's probe
/// states belong to the same parameter.
fn place_of(id: ParamId) -> u64 {
    // Fibonacci hashing, because sequential ids have equal high bits.
    id.val().wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (u64::BITS - PLACE_BITS)
}

/// The trials of a root's optimizer, one for each parameter because groups may have different optimizers.
#[derive(Debug)]
pub(crate) struct Trial {
    warned: Once,
    parameters: Mutex<Parameters>,
}

#[derive(Debug, Default)]
struct Parameters {
    /// The probes that the last backward registered, by their parameter's [`place_of`].
    probes: HashMap<u64, Probes>,
    tried: HashSet<ParamId>,
}

/// A parameter on which to try an optimizer.
pub(crate) struct Subject {
    pub(crate) id: ParamId,
    /// The device of the parameter's shard, with autodiff.
    pub(crate) device: Device,
    pub(crate) dtype: DType,
    /// True if optimizers see only a part of the parameter.
    pub(crate) is_cut: bool,
}

#[derive(Debug, Clone)]
struct Probes {
    /// The parameter with which these probes are passed to mappers.
    shown_with: ParamId,
    device: Device,
    dtype: DType,
    num_shards: usize,
}

/// A probe, by its number among the probes of one parameter.
#[derive(Debug, Clone, Copy)]
enum Probe {
    Whole = 0,
    Rows = 1,
    Flat = 3,
    /// The probe that never has a gradient.
    Control = 7,
}

/// The result of passing probes to a map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// Nothing changed: the map has no gradients for the probes, or a learning rate of 0.
    Unmoved,
    /// The control changed: the map changes values without gradients.
    NoOptimizer,
    Elementwise,
    WholeTensors,
}

impl Default for Trial {
    fn default() -> Self {
        Self {
            warned: Once::new(),
            parameters: Mutex::default(),
        }
    }
}

impl Trial {
    /// Registers gradients for the probes of those `subjects` whose optimizer has not been tried yet. `subjects` are
    /// the trained parameters that optimizers see in parts.
    pub(crate) fn register(
        &self,
        subjects: impl Iterator<Item = Subject>,
        gradients: &mut GradientsParams,
    ) {
        let mut parameters = self.parameters.lock();
        parameters.probes.clear();
        for subject in subjects {
            // If two parameters share a place, the second is tried after the first.
            let place = place_of(subject.id);
            if parameters.tried.contains(&subject.id) || parameters.probes.contains_key(&place) {
                continue;
            }
            let probes = Probes::of(subject);
            probes.register_all(gradients);
            parameters.probes.insert(place, probes);
        }
    }

    /// Records that the optimizer of the parameter `id` passed its trial.
    pub(crate) fn pass(&self, id: ParamId) {
        let mut parameters = self.parameters.lock();
        parameters.tried.insert(id);
        let place = place_of(id);
        if parameters
            .probes
            .get(&place)
            .is_some_and(|probes| probes.shown_with == id)
        {
            parameters.probes.remove(&place);
        }
    }

    /// Returns the probes of a parameter that has not been tried yet.
    fn untried(&self, param: &Param<Tensor<1>>) -> Option<Probes> {
        let parameters = self.parameters.lock();
        if parameters.tried.contains(&param.id) {
            return None;
        }
        let registered = parameters.probes.get(&place_of(param.id));
        let registered = registered.filter(|probes| probes.shown_with == param.id);
        // Without gradients, in a loop that calls Burn's backward, only the control is meaningful: it detects maps that
        // change values without gradients.
        Some(registered.cloned().unwrap_or_else(|| Probes::lone(param)))
    }

    /// Passes the probes to `mapper`, which is about to map over `param` at `path`. Throws an error if `mapper` is an
    /// optimizer that computes with whole tensors.
    ///
    /// Returns the value of `param` if nothing is known about the mapper yet; [`watched`](Self::watched) then detects
    /// whether the value changes.
    pub(crate) fn show<M: ModuleMapper>(
        &self,
        param: &Param<Tensor<1>>,
        path: &str,
        mapper: &mut M,
    ) -> Option<Tensor<1>> {
        if !param.is_require_grad() {
            return None;
        }
        match self.untried(param)?.verdict(mapper) {
            Verdict::Unmoved => (!self.warned.is_completed()).then(|| param.base()),
            Verdict::NoOptimizer => None,
            Verdict::Elementwise => {
                self.pass(param.id);
                None
            }
            Verdict::WholeTensors => throw(Error::WholeTensors {
                path: path.to_owned(),
            }),
        }
    }

    /// Maps over a parameter at `path`. `before` is the parameter's value if nothing is known about the mapper. In that
    /// case, warns once if the value changes, because the mapper may be an optimizer that computes with whole tensors,
    /// and throws an error if the mapper panics.
    pub(crate) fn watched(
        &self,
        before: Option<Tensor<1>>,
        path: &str,
        map: impl FnOnce() -> Shown,
    ) -> Shown {
        let Some(before) = before else {
            return map();
        };
        let mapped = catch_unwind(AssertUnwindSafe(map));
        let mapped = mapped.unwrap_or_else(|panic| match words(&*panic) {
            None => resume_unwind(panic),
            Some(panic) => throw(Error::Untried {
                path: path.to_owned(),
                panic,
            }),
        });
        if let Shown::One(after) = &mapped
            && bits(before) != bits(after.base())
        {
            self.warned.call_once(|| {
                report::warn(format!(
                    "the shard of `{path}` was updated, but it is unknown whether the optimizer may work on shards, \
                     because the gradients do not come directly from this crate's `backward(loss, &model)`; call \
                     `check_elementwise(&model, &optimizer)` once before training"
                ));
            });
        }
        mapped
    }
}

/// Returns the message of a panic; `None` if it has none, as this crate's own errors.
fn words(panic: &(dyn Any + Send)) -> Option<String> {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
}

impl Probes {
    fn of(subject: Subject) -> Self {
        Self {
            shown_with: subject.id,
            device: subject.device,
            dtype: subject.dtype,
            num_shards: if subject.is_cut { 2 } else { 1 },
        }
    }

    /// Returns probes for a map without registered gradients.
    fn lone(param: &Param<Tensor<1>>) -> Self {
        let value = param.base();
        Self {
            shown_with: param.id,
            device: value.device(),
            dtype: value.dtype(),
            num_shards: 1,
        }
    }

    fn register_all(&self, gradients: &mut GradientsParams) {
        let len = LEN / self.num_shards;
        self.register(Probe::Whole, 0, [SIDE, SIDE], gradients);
        for shard in 0..self.num_shards {
            if self.num_shards > 1 {
                let rows = [SIDE / self.num_shards, SIDE];
                self.register(Probe::Rows, shard, rows, gradients);
            }
            self.register(Probe::Flat, shard, [len], gradients);
        }
    }

    fn id(&self, probe: Probe, shard: usize) -> ParamId {
        // Records must not confuse the states of the two kinds.
        let kind = if self.num_shards == 1 { STRIDE / 2 } else { 0 };
        let number = (probe as usize + shard) as u64;
        ParamId::from(RESERVED + place_of(self.shown_with) * STRIDE + kind + number)
    }

    fn register<const D: usize>(
        &self,
        probe: Probe,
        shard: usize,
        shape: [usize; D],
        gradients: &mut GradientsParams,
    ) {
        let start = shard * (LEN / self.num_shards);
        let gradient = self.tensor(shape, |i| gradient_of_halves(self.dtype, start + i, 1));
        gradients.register(self.id(probe, shard), gradient.inner());
    }

    /// Passes the probes to `mapper` and returns the verdict. All probes are passed even if the matrix does not change,
    /// so their states advance together.
    fn verdict<M: ModuleMapper>(&self, mapper: &mut M) -> Verdict {
        let matrix = [SIDE, SIDE];
        let (before, control) = self.mapped(Probe::Control, 0, matrix, mapper);
        if control.as_ref() != Some(&before) {
            return Verdict::NoOptimizer;
        }
        // An optimizer that accepts no matrix at all does not compute with whole ones.
        let (before, Some(whole)) = self.mapped(Probe::Whole, 0, matrix, mapper) else {
            return Verdict::Elementwise;
        };
        let len = LEN / self.num_shards;
        let bytes = len * self.dtype.size();
        let of_shard = |shard: usize| &whole[shard * bytes..][..bytes];
        // Rows come first: an optimizer that needs two dimensions then fails without a panic message.
        for shard in (0..self.num_shards).filter(|_| self.num_shards > 1) {
            let rows = [SIDE / self.num_shards, SIDE];
            let (_, after) = self.mapped(Probe::Rows, shard, rows, mapper);
            if after.as_deref() != Some(of_shard(shard)) {
                return Verdict::WholeTensors;
            }
        }
        for shard in 0..self.num_shards {
            let (_, after) = self.mapped(Probe::Flat, shard, [len], mapper);
            if after.as_deref() != Some(of_shard(shard)) {
                return Verdict::WholeTensors;
            }
        }
        if whole == before {
            Verdict::Unmoved
        } else {
            Verdict::Elementwise
        }
    }

    /// Returns the bits of a probe before and after the map; `None` after a panic.
    fn mapped<const D: usize, M: ModuleMapper>(
        &self,
        probe: Probe,
        shard: usize,
        shape: [usize; D],
        mapper: &mut M,
    ) -> (Vec<u8>, Option<Vec<u8>>) {
        let start = shard * (LEN / self.num_shards);
        let value = self.tensor(shape, |i| VALUE * element(start + i, 0));
        let before = bits(value.clone());
        let param = Param::initialized(self.id(probe, shard), value.require_grad());
        let after = catch_unwind(AssertUnwindSafe(|| bits(Module::map(param, mapper).base())));
        (before, after.ok())
    }

    fn tensor<const D: usize>(
        &self,
        shape: [usize; D],
        element: impl Fn(usize) -> f32,
    ) -> Tensor<D> {
        tensor_of(shape, element, &self.device, self.dtype)
    }
}

fn bits<const D: usize>(tensor: Tensor<D>) -> Vec<u8> {
    tensor.into_data().as_bytes().to_vec()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use burn::module::ParamId;

    use super::{PLACE_BITS, RESERVED, STRIDE, is_probe, place_of};

    #[test]
    fn the_ids_of_probes_are_known() {
        let last = RESERVED + (STRIDE << PLACE_BITS) - 1;
        assert!(is_probe(ParamId::from(RESERVED)) && is_probe(ParamId::from(last)));
        assert!(!is_probe(ParamId::from(RESERVED - 1)) && !is_probe(ParamId::from(last + 1)));
        assert!(!is_probe(ParamId::new()));
    }

    #[test]
    fn parameters_of_a_model_have_distinct_places() {
        let places = |ids: &mut dyn Iterator<Item = u64>| {
            let places: HashSet<_> = ids.map(|id| place_of(ParamId::from(id))).collect();
            assert!(places.iter().all(|place| *place < 1 << PLACE_BITS));
            places.len()
        };
        assert_eq!(places(&mut (0..10_000)), 10_000);
        let spread = &mut (0..10_000).map(|i| i << 40);
        assert!(places(spread) > 9_990);
    }
}
