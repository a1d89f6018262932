//! The trial that finds out whether the optimizer that makes a first step may work on shards.
//!
//! Burn tells nobody when an optimizer steps: it maps over the module, as others do, with gradients that
//! it finds by id. So [`backward`](crate::backward) puts gradients for a small matrix, whole and in two
//! shards, beside those of the module, under ids of their own. A map that reaches the first sharded
//! parameter is shown matrix and shards, too. Who has no gradients for them changes nothing; who changes
//! what has no gradient is no optimizer; and who comes to other bits for the shards than for the same
//! elements of the whole computes with whole tensors.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Tensor, TensorData};
use parking_lot::Mutex;

use crate::error::{Error, throw};
use crate::report;

/// Number of rows and of columns of the matrix on trial: halves of it are whole vectors of any
/// processor, so that equal arithmetic gives equal bits.
pub(crate) const SIDE: usize = 16;
/// Number of elements of the matrix.
pub(crate) const LEN: usize = SIDE * SIDE;

/// Returns element `i` of the matrix or of its gradient in a step: of either sign, never zero, and
/// with rows and columns of different sizes.
pub(crate) fn element(i: usize, step: usize) -> f32 {
    let (row, column) = (i / SIDE, i % SIDE);
    let sign = if (i * 7 + step * 3) % 5 < 2 {
        -1.0
    } else {
        1.0
    };
    sign * (1.0 + row as f32) * (0.3 + ((column * 5 + step) % 7) as f32) / 40.0
}

/// Returns a tensor of these elements, by their place in a row.
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
/// Number of roots, of those in one backward, that have probes of their own.
const MOST_PLACES: usize = 128;
/// Number of ids for the probes of one root: half for what is cut, half for what is only flat.
const STRIDE: u64 = 16;
/// The segment of a path under which probes are shown.
const NAME: &str = "probe";
/// The size of the probes' values: small, so that a small step of a 16-bit type is seen.
const VALUE: f32 = 1.0 / 64.0;

/// Sizes of gradients in a row. Adam divides by their size, so that clipping shows only where they come
/// near its epsilon.
const SIZES: [f32; 8] = [1.0, 1e-2, 1e-4, 1e-6, 1e-8, 1e-10, 1e-12, 1e-14];

/// Returns the scale of the gradients: beyond any sensible threshold of clipping by norm, while the
/// square is a number.
fn scale(dtype: DType) -> f32 {
    match dtype {
        DType::F16 => 64.0,
        _ => 1e6,
    }
}

/// Returns true if `id` is one that the trial of an optimizer uses, and no parameter's: the first
/// step of an optimizer leaves states of such ids in its records, which are of no use to anybody.
pub fn is_probe(id: ParamId) -> bool {
    (RESERVED..RESERVED + MOST_PLACES as u64 * STRIDE).contains(&id.val())
}

/// The trial of the optimizer that steps the parameters of a root.
#[derive(Debug, Default)]
pub(crate) struct Trial {
    is_over: AtomicBool,
    probes: Mutex<Option<Probes>>,
}

/// The parameter at which an optimizer is tried.
pub(crate) struct Subject {
    pub(crate) id: ParamId,
    /// The device of its shard, with autodiff.
    pub(crate) device: Device,
    pub(crate) dtype: DType,
    /// True if optimizers see a part of it.
    pub(crate) is_cut: bool,
}

/// The probes whose gradients the last backward has registered.
#[derive(Debug, Clone)]
struct Probes {
    /// Number of the root in its backward.
    place: usize,
    /// The parameter with which they are shown.
    shown_with: ParamId,
    device: Device,
    dtype: DType,
    num_shards: usize,
}

/// A probe, by its number among those of a root.
#[derive(Debug, Clone, Copy)]
enum Probe {
    Whole = 0,
    Rows = 1,
    Flat = 3,
    /// The probe that never has a gradient.
    Control = 7,
}

/// The effect of a map on probes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// No change: the map has no gradients for them, or a learning rate of 0.
    Unmoved,
    /// A change of whatever the map is shown.
    NoOptimizer,
    Elementwise,
    WholeTensors,
}

impl Trial {
    /// Returns true if an optimizer is still to be tried.
    pub(crate) fn is_pending(&self) -> bool {
        !self.is_over.load(Ordering::Relaxed)
    }

    /// Ends the trial: no optimizer will be tried from now on.
    pub(crate) fn end(&self) {
        self.is_over.store(true, Ordering::Relaxed);
        *self.probes.lock() = None;
    }

    /// Registers gradients for the probes of the root that is number `place` in this backward, to be
    /// shown with `subject`.
    pub(crate) fn register(&self, place: usize, subject: Subject, gradients: &mut GradientsParams) {
        if place >= MOST_PLACES {
            return;
        }
        let probes = Probes {
            place,
            shown_with: subject.id,
            device: subject.device,
            dtype: subject.dtype,
            num_shards: if subject.is_cut { 2 } else { 1 },
        };
        let len = LEN / probes.num_shards;
        probes.register(Probe::Whole, 0, [SIDE, SIDE], gradients);
        for shard in 0..probes.num_shards {
            if probes.num_shards > 1 {
                let rows = [SIDE / probes.num_shards, SIDE];
                probes.register(Probe::Rows, shard, rows, gradients);
            }
            probes.register(Probe::Flat, shard, [len], gradients);
        }
        *self.probes.lock() = Some(probes);
    }

    /// Shows the probes to `mapper`, which is about to map over `param` at `path`. Leaves with an error
    /// if that is an optimizer which computes with whole tensors.
    ///
    /// Returns the value of `param` if [`compare`](Self::compare) is to say whether it changes: nothing
    /// is known yet of who maps.
    pub(crate) fn show<M: ModuleMapper>(
        &self,
        param: &Param<Tensor<1>>,
        path: &str,
        mapper: &mut M,
    ) -> Option<Tensor<1>> {
        if !param.is_require_grad() {
            return None;
        }
        let probes = self.probes.lock().clone();
        let verdict = match &probes {
            Some(probes) if probes.shown_with == param.id => probes.verdict(mapper),
            Some(_) => return None,
            // A loop that calls Burn's backward. Whoever changes what has no gradient is not meant.
            None if WARNED.is_completed() => return None,
            None => Probes::unregistered(param).verdict(mapper),
        };
        match verdict {
            Verdict::Unmoved => (!WARNED.is_completed()).then(|| param.base()),
            Verdict::NoOptimizer => None,
            Verdict::Elementwise => {
                self.end();
                None
            }
            Verdict::WholeTensors => throw(Error::WholeTensors {
                path: path.to_owned(),
            }),
        }
    }

    /// Warns once that an optimizer was not tried, if the map has changed `before` to `after`.
    pub(crate) fn compare(before: Option<Tensor<1>>, after: &Param<Tensor<1>>, path: &str) {
        let Some(before) = before else { return };
        if bits(before) == bits(after.base()) {
            return;
        }
        WARNED.call_once(|| {
            report::warn(format!(
                "the shard of `{path}` was updated, and it is not known whether by an optimizer that may \
                 work on shards: the gradients are not straight from `backward(loss, &model)` of this \
                 crate; call `check_elementwise(&model, &optimizer)` once before training"
            ));
        });
    }
}

static WARNED: Once = Once::new();

impl Probes {
    /// Returns the probes of no backward, of which the control alone has a meaning.
    fn unregistered(param: &Param<Tensor<1>>) -> Self {
        let value = param.base();
        Self {
            place: MOST_PLACES - 1,
            shown_with: param.id,
            device: value.device(),
            dtype: value.dtype(),
            num_shards: 1,
        }
    }

    fn id(&self, probe: Probe, shard: usize) -> ParamId {
        // A record's state of the one kind is none of the other.
        let kind = if self.num_shards == 1 { STRIDE / 2 } else { 0 };
        let number = (probe as usize + shard) as u64;
        ParamId::from(RESERVED + self.place as u64 * STRIDE + kind + number)
    }

    fn register<const D: usize>(
        &self,
        probe: Probe,
        shard: usize,
        shape: [usize; D],
        gradients: &mut GradientsParams,
    ) {
        let start = shard * (LEN / self.num_shards);
        let scale = scale(self.dtype);
        let gradient = self.tensor(shape, |i| {
            let size = SIZES[i % SIZES.len()];
            scale * size * element(start + i, 1)
        });
        gradients.register(self.id(probe, shard), gradient.inner());
    }

    /// Shows the probes to `mapper` and returns their verdict. All are shown also if the matrix
    /// does not move: their states go on alike.
    fn verdict<M: ModuleMapper>(&self, mapper: &mut M) -> Verdict {
        let matrix = [SIDE, SIDE];
        let (before, control) = self.mapped(Probe::Control, 0, matrix, mapper);
        if control.as_ref() != Some(&before) {
            return Verdict::NoOptimizer;
        }
        // What does not take a matrix at all, sharded or not, does not compute with whole ones.
        let (before, Some(whole)) = self.mapped(Probe::Whole, 0, matrix, mapper) else {
            return Verdict::Elementwise;
        };
        let len = LEN / self.num_shards;
        let bytes = len * self.dtype.size();
        let of_shard = |shard: usize| &whole[shard * bytes..][..bytes];
        // In rows first: what needs two dimensions then fails without a panic's message.
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
        match whole == before {
            true => Verdict::Unmoved,
            false => Verdict::Elementwise,
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
        mapper.enter_module(NAME, NAME);
        let after = catch_unwind(AssertUnwindSafe(|| bits(Module::map(param, mapper).base())));
        mapper.exit_module(NAME, NAME);
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
    use burn::module::ParamId;

    use super::{MOST_PLACES, RESERVED, STRIDE, is_probe};

    #[test]
    fn the_ids_of_probes_are_known() {
        let last = RESERVED + MOST_PLACES as u64 * STRIDE - 1;
        assert!(is_probe(ParamId::from(RESERVED)) && is_probe(ParamId::from(last)));
        assert!(!is_probe(ParamId::from(RESERVED - 1)) && !is_probe(ParamId::from(last + 1)));
        assert!(!is_probe(ParamId::new()));
    }
}
