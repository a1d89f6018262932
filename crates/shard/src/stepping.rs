//! Backward that steps the optimizer unit by unit, as soon as a unit's gradients are complete.

use std::collections::HashMap;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Module, ParamId};
use burn::optim::{GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::{Shape, Tensor};
use parking_lot::Mutex;

use crate::ambient;
use crate::copies::Generation;
use crate::error::Error;
use crate::inspect;
use crate::leaves::Reachable;
use crate::op::Reduced;
use crate::parameter::part::{self, Parameters, Part};
use crate::probes::Trial;
use crate::root::{Root, Steps};
use crate::state::buffers::seal_running_states;
use crate::step::{Begun, differentiated, subject};
use crate::thrown::catch;

/// Differentiates `loss`, updates `module` with `optimizer`, and returns the updated module: [`backward`] and
/// [`ModuleOptimizer::step`] in one call, with the same results to the bit, and without all gradients at once.
///
/// As soon as a unit's last gradient has arrived, the optimizer updates the unit's shards. Then both the gradients and
/// the old values are freed. So a rank holds the gradients of two units at most, instead of all, if it uses each unit.
/// A rank that only takes part in the reductions of some units updates them when backward next reaches a unit that it
/// uses. The unit's gathers and
/// reductions stay the same. At the end of backward, the optimizer updates the rest:
///
/// - units with another reduction in this backward, on any rank: because several parts of the model use them, as the
///   fields of a tied parameter do, or two forwards share the loss. A forward that runs tracked and has no backward
///   also counts as a use;
/// - parameters kept whole, and parameters that no unit manages.
///
/// A step in which no rank has gradients of a unit leaves the unit's values unchanged, as usual.
///
/// If a module's first backward is another function's, old values are freed early from the second call of this one on.
///
/// What needs all gradients before the first update is not available: [`clip_grad_norm`](crate::clip_grad_norm),
/// [`grad_norm`](crate::grad_norm), [`LossScaler`](crate::LossScaler) (whose scaled loss would be stepped with scaled
/// gradients), and any other inspection of gradients. Burn's own clipping, of single gradients, works. The learning
/// rate may differ by group. Use the same optimizer in all steps. An optimizer that steps itself, such as the
/// file-backed one of `burn-fsdp`, needs [`backward`] and
/// [`gradients_by_unit`](crate::gradients_by_unit).
///
/// With [`recompute`](crate::recompute), pass each region only its own block: a region's copy of the module keeps the
/// old values of its units until its backward ends. To accumulate gradients, call [`backward`] in
/// [`no_sync`](crate::no_sync) for all micro-batches except the last, and this function for the last.
///
/// Each early update walks over the whole module. [`Memory::gradients_peak`](crate::Memory::gradients_peak) shows the
/// gradients that existed together.
///
/// ```no_run
/// # use burn::{module::Module, optim::AdamWConfig, tensor::Tensor};
/// # use burn_fsdp_shard::{Error, backward_and_step};
/// # fn train<M: Module + 'static>(mut model: M, loss: impl Fn(&M) -> Tensor<1>) -> Result<M, Error> {
/// let mut optimizer = AdamWConfig::new().init();
/// for _ in 0..100 {
///     let loss = loss(&model);
///     model = backward_and_step(loss, model, &mut optimizer, 1e-3)?;
/// }
/// # Ok(model)
/// # }
/// ```
///
/// Collective. A rank may call [`backward`] and step instead.
///
/// # Errors
///
/// - [`Error::State`] if units do not reduce their gradients in this backward (`no_sync`,
///   [`set_is_last_backward`](crate::UnitHandle::set_is_last_backward),
///   [`set_requires_all_reduce`](crate::UnitHandle::set_requires_all_reduce)).
/// - The errors of [`backward`], and [`Error::WholeTensors`] at the first step.
///
/// An error consumes the module, because some of its units may have been updated and others not; `optimizer` is in the
/// same state. Other ranks get an error from their next operation, as after any error. Continue from a checkpoint.
///
/// [`backward`]: crate::backward
pub fn backward_and_step<M: Module + 'static, const D: usize>(
    loss: Tensor<D>,
    module: M,
    optimizer: &mut ModuleOptimizer,
    learning_rate: impl Into<ModuleLearningRate>,
) -> Result<M, Error> {
    let roots = inspect::roots_of(&module)?;
    expect_reductions(&roots)?;
    let stepper = Arc::new(Stepper {
        ids: ids(&module),
        learning_rate: learning_rate.into(),
        held: Mutex::new(Held {
            module: Some(module),
            // Burn's graph calls the root, which needs the optimizer without a borrow.
            optimizer: mem::replace(optimizer, SgdConfig::new().init()),
            stepped: Parameters::default(),
        }),
    });
    let result = catch_unwind(AssertUnwindSafe(|| {
        catch(|| stepper.run(loss, &roots)).and_then(|result| result)
    }));
    let is_done = matches!(result, Ok(Ok(_)));
    for root in &roots {
        if is_done {
            root.step_along(None);
        } else {
            root.reset();
        }
    }
    let placeholder = &mut stepper.held.lock().optimizer;
    mem::swap(optimizer, placeholder);
    result.unwrap_or_else(|panic| resume_unwind(panic))
}

/// Checks that all units reduce and return their gradients.
fn expect_reductions(roots: &[Arc<Root>]) -> Result<(), Error> {
    for root in roots {
        let units = root.units();
        let waits = |unit: &&Arc<_>| !root.returns_gradients_of(unit);
        if let Some(unit) = units.iter().find(waits) {
            return Err(Error::State {
                unit: unit.label(),
                expected: "set to reduce its gradients, for `backward_and_step`".to_owned(),
                got: "set to keep them for a later backward".to_owned(),
                advice: "call `backward` for this micro-batch, and `backward_and_step` for the last one",
            });
        }
    }
    Ok(())
}

/// Returns the ids of the sharded parameters that are trained, by their leaf.
fn ids<M: Module>(module: &M) -> HashMap<u64, ParamId> {
    let members = inspect::members(module).into_iter();
    let ids = members.filter_map(|member| {
        let leaf = member.generation.node(member.index)?;
        Some((leaf.value, member.id))
    });
    ids.collect()
}

/// A module and its optimizer, during a backward that steps.
struct Stepper<M> {
    ids: HashMap<u64, ParamId>,
    learning_rate: ModuleLearningRate,
    held: Mutex<Held<M>>,
}

struct Held<M> {
    /// `None` after an error in a step.
    module: Option<M>,
    optimizer: ModuleOptimizer,
    /// The parameters that were updated in this backward.
    stepped: Parameters,
}

impl<M: Module> Held<M> {
    /// Updates a part of the module. A panic consumes the module, but not the optimizer.
    fn step(&mut self, learning_rate: &ModuleLearningRate, part: Part, gradients: GradientsParams) {
        let Some(module) = self.module.take() else {
            return;
        };
        let stepped = ambient::outside(|| {
            part::within(part, || {
                self.optimizer
                    .step(learning_rate.clone(), module, gradients)
            })
        });
        self.module = Some(stepped);
    }
}

impl<M: Module + 'static> Stepper<M> {
    /// Runs backward with early updates, then updates the rest, and returns the module.
    fn run<const D: usize>(
        self: &Arc<Self>,
        loss: Tensor<D>,
        roots: &[Arc<Root>],
    ) -> Result<M, Error> {
        let mut begun = self.with_module(|module| {
            seal_running_states(module, &roots[0])?;
            Begun::new(&loss, &mut Reachable::of(module), roots)
        })?;
        for root in roots {
            root.step_along(Some(self.clone()));
        }
        let mut gradients = differentiated(loss)?;
        self.with_module(|module| begun.finish_unused(&mut gradients, module, roots))?;
        for root in roots {
            root.step_complete_units()?;
        }
        // The module has been updated, so its parameters are other tensors than before.
        let gradients = self.with_module(|module| {
            begun.end(gradients, module, (&inspect::members(module), roots))
        })?;
        let mut held = self.held.lock();
        let rest = Part::Except(mem::take(&mut held.stepped));
        held.step(&self.learning_rate, rest, gradients);
        held.module.take().ok_or(Error::NotSharded)
    }

    fn with_module<T>(&self, body: impl FnOnce(&M) -> Result<T, Error>) -> Result<T, Error> {
        match &self.held.lock().module {
            Some(module) => body(module),
            None => Err(Error::NotSharded),
        }
    }
}

impl<M: Module + 'static> Steps for Stepper<M> {
    fn knows(&self, leaf: NodeId) -> bool {
        self.ids.contains_key(&leaf.value)
    }

    fn step(
        &self,
        trial: &Trial,
        generation: &Arc<Generation>,
        slots: &[usize],
        gradients: Vec<Reduced>,
    ) -> Result<(), Error> {
        let mut of_unit = GradientsParams::new();
        for reduced in gradients {
            if let Some(&id) = self.ids.get(&reduced.node.value) {
                register(&mut of_unit, id, reduced.gradient, &reduced.shape);
            }
        }
        if !of_unit.is_empty() {
            let subjects = slots.iter().filter_map(|&slot| {
                let id = self.ids.get(&generation.node(slot)?.value)?;
                subject(generation, slot, *id)
            });
            trial.register(subjects, &mut of_unit);
        }
        let mut only = Parameters::default();
        only.add(&generation.unit, slots);
        let mut held = self.held.lock();
        held.stepped.add(&generation.unit, slots);
        held.step(&self.learning_rate, Part::Only(only), of_unit);
        Ok(())
    }
}

/// Registers a flat gradient in the shape of its parameter.
fn register(gradients: &mut GradientsParams, id: ParamId, flat: Tensor<1>, shape: &Shape) {
    match shape.num_dims() {
        2 => gradients.register(id, flat.reshape::<2, _>(shape.clone())),
        3 => gradients.register(id, flat.reshape::<3, _>(shape.clone())),
        4 => gradients.register(id, flat.reshape::<4, _>(shape.clone())),
        5 => gradients.register(id, flat.reshape::<5, _>(shape.clone())),
        6 => gradients.register(id, flat.reshape::<6, _>(shape.clone())),
        _ => gradients.register(id, flat),
    }
}
