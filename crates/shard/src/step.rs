//! Backward, and the work around it in a training step.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Gradients, Tensor};

use crate::copies::Generation;
use crate::error::Error;
use crate::inspect::{self, Member};
use crate::leaves::{self, Leaf, Reachable};
use crate::op::Reduced;
use crate::probes::Subject;
use crate::root::Root;
use crate::state::buffers::seal_running_states;
use crate::thrown::catch;
use crate::unmanaged;

/// Differentiates `loss` and returns the gradients of this rank's shards, averaged over the ranks. Any element-wise
/// Burn optimizer accepts them.
///
/// Equivalent to `GradientsParams::from_grads(loss.backward(), module)`, which also works, with two exceptions. Errors
/// are returned as values, and a rank whose loss uses no unit still takes part in the other ranks' reductions.
///
/// Until an optimizer's first step, the result also has up to five small gradients for each trained parameter that
/// optimizers see as a flat tensor. They belong to a matrix and its shards, under separate ids
/// ([`is_probe`](crate::is_probe)). They let that step detect an optimizer that computes with whole tensors, and fail
/// with [`Error::WholeTensors`], which [`catch`](crate::catch) turns into a value. Groups by path are tried, but groups
/// by ids are not, because probes have separate ids. Burn's `GradientsAccumulator` and
/// [`gradients_by_unit`](crate::gradients_by_unit) drop the probes, and a warning reports that.
/// [`check_elementwise`](crate::check_elementwise) tries all groups, including those by ids.
///
/// Collective.
///
/// # Errors
///
/// - [`Error::Unmanaged`] if several ranks train a parameter that is neither sharded nor ignored by the policy. Burn's
///   own backward does not detect this.
/// - [`Error::NoGraph`] for a loss without autodiff, or a module without a trained parameter.
/// - [`Error::NotSharded`], [`Error::Consumed`], [`Error::SharedLeaf`], [`Error::Recomputed`], [`Error::Hook`] and
///   [`Error::Audit`].
/// - Errors of its collectives: another rank's failure, a timeout, mismatched operations.
///
/// After an error, every unit is sharded and nothing is pending.
pub fn backward<M: Module, const D: usize>(
    loss: Tensor<D>,
    module: &M,
) -> Result<GradientsParams, Error> {
    let reachable = Reachable::of(module);
    let roots = inspect::roots_among(&reachable.members)?;
    let result = catch_unwind(AssertUnwindSafe(|| {
        catch(|| {
            seal_running_states(module, &roots[0])?;
            reduced_gradients(loss, module, reachable, &roots)
        })
        .and_then(|result| result)
    }));
    // This also covers a panic in user code, such as a hook. Otherwise the current pass would hold a graph whose nodes
    // hold the root, and the module would never be freed.
    if !matches!(result, Ok(Ok(_))) {
        roots.iter().for_each(|root| root.reset());
    }
    result.unwrap_or_else(|panic| resume_unwind(panic))
}

/// Returns the gradients of `loss`, including gradients of parameters that only other ranks used.
fn reduced_gradients<M: Module, const D: usize>(
    loss: Tensor<D>,
    module: &M,
    mut reachable: Reachable,
    roots: &[Arc<Root>],
) -> Result<GradientsParams, Error> {
    let mut begun = Begun::new(&loss, &mut reachable, roots)?;
    let mut gradients = differentiated(loss)?;
    begun.finish_unused(&mut gradients, module, roots)?;
    begun.end(gradients, module, (&reachable.members, roots))
}

/// A backward of a module's roots that has begun.
pub(crate) struct Begun {
    /// The number of backwards that each root had finished before.
    finished: Vec<u64>,
    /// The indices of the roots that the loss does not use on this rank.
    unused: Vec<usize>,
    /// The trained parameters outside of all units.
    leaves: Vec<Leaf>,
    _claim: Option<leaves::Claim>,
}

impl Begun {
    /// Begins a backward. Takes the leaves of the module.
    pub(crate) fn new<const D: usize>(
        loss: &Tensor<D>,
        reachable: &mut Reachable,
        roots: &[Arc<Root>],
    ) -> Result<Self, Error> {
        if !loss.is_tracked() || !reachable.is_any_trained() {
            return Err(Error::NoGraph);
        }
        let leaves = std::mem::take(&mut reachable.leaves);
        let is_first = roots.iter().all(|root| root.num_finished() == 0);
        let group = &roots[0].group;
        let claim = is_first.then(|| leaves::claim(&leaves, group.world_rank(), group.size()));
        Ok(Self {
            _claim: claim.transpose()?,
            finished: roots.iter().map(|root| root.num_finished()).collect(),
            unused: Vec::new(),
            leaves,
        })
    }

    /// Ends the backward of the roots that Burn's backward has not reached.
    pub(crate) fn finish_unused<M: Module>(
        &mut self,
        gradients: &mut Gradients,
        module: &M,
        roots: &[Arc<Root>],
    ) -> Result<(), Error> {
        for (index, root) in roots.iter().enumerate() {
            if root.num_finished() != self.finished[index] {
                continue;
            }
            self.unused.push(index);
            let members = inspect::members(module);
            let own = members
                .iter()
                .find(|member| root.owns(&member.generation.unit));
            let copy = own.map(|member| member.copy);
            let reduced = root.finish_unused(copy)?;
            let handed_over: Vec<_> = reduced.iter().map(|reduced| reduced.node).collect();
            register(gradients, reduced, module);
            root.handed_over(&handed_over);
        }
        Ok(())
    }

    /// Returns the gradients of the module's parameters, after the last audits. `members` are its sharded parameters.
    pub(crate) fn end<M: Module>(
        self,
        gradients: Gradients,
        module: &M,
        (members, roots): (&[Member], &[Arc<Root>]),
    ) -> Result<GradientsParams, Error> {
        // Burn's backward has ended the audits of the others.
        for index in self.unused {
            roots[index].end_audit()?;
        }
        let mut gradients = GradientsParams::from_grads(gradients, module);
        unmanaged::refuse(&self.leaves, roots, &gradients)?;
        if !gradients.is_empty() {
            register_probes(members, roots, &mut gradients);
        }
        Ok(gradients)
    }
}

/// Registers the probes that try an optimizer at its first step, for each root. Called in each step, because a
/// parameter may have become trainable since the last one.
fn register_probes(members: &[Member], roots: &[Arc<Root>], gradients: &mut GradientsParams) {
    for root in roots {
        let own = members
            .iter()
            .filter(|member| root.owns(&member.generation.unit));
        let subjects =
            own.filter_map(|member| subject(&member.generation, member.index, member.id));
        root.trial.register(subjects, gradients);
    }
}

/// Returns the parameter in slot `index` of `generation`, whose id is `id`, for the trial of its optimizer; `None` if it
/// is frozen or optimizers see it in its own shape.
pub(crate) fn subject(generation: &Generation, index: usize, id: ParamId) -> Option<Subject> {
    let slot = &generation.unit.slots[index];
    let is_tried = slot.is_flattened() && generation.is_trainable(index);
    is_tried.then(|| Subject {
        id,
        device: generation.value(index).device(),
        dtype: slot.elements.stored.dtype,
        is_cut: slot.is_cut(),
    })
}

/// Runs Burn's backward. Returns [`Error::Consumed`] if the graph is gone, for example because two forwards shared
/// nodes.
pub(crate) fn differentiated<const D: usize>(loss: Tensor<D>) -> Result<Gradients, Error> {
    catch_unwind(AssertUnwindSafe(|| loss.backward())).or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        if text.is_some_and(|text| text.contains("tape has already been consumed")) {
            Err(Error::Consumed)
        } else {
            resume_unwind(panic)
        }
    })
}

/// Stores reduced gradients where Burn looks for the gradients of `module`.
fn register<M: Module>(gradients: &mut Gradients, reduced: Vec<Reduced>, module: &M) {
    let mut place = PutBack { gradients, reduced };
    module.visit(&mut place);
}

struct PutBack<'a> {
    gradients: &'a mut Gradients,
    reduced: Vec<Reduced>,
}

impl ModuleVisitor for PutBack<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = param.base();
        if !value.is_autodiff() || !value.is_require_grad() {
            return;
        }
        let node = crate::op::node_of(value.clone());
        // Each use of the unit has a reduced gradient.
        let uses = self.reduced.iter().filter(|reduced| reduced.node == node);
        let gradients = uses.map(|reduced| reduced.gradient.clone());
        if let Some(sum) = gradients.reduce(|sum, next| sum + next) {
            let mut sum = sum.reshape::<D, _>(value.shape());
            if let Some(earlier) = value.grad(self.gradients) {
                sum = sum + earlier;
            }
            value.grad_replace(self.gradients, sum);
        }
    }
}

/// Drops all full parameters and all pending work of `module`, as after an error.
///
/// For programs that catch their own panic inside forward or backward. Not collective, but all ranks must call this;
/// otherwise the next operation reports a mismatch.
///
/// # Errors
///
/// [`Error::NotSharded`].
pub fn reset<M: Module>(module: &M) -> Result<(), Error> {
    for root in inspect::roots_of(module)? {
        root.reset();
    }
    Ok(())
}

/// Returns the type in which a sharded `module` expects its inputs: the compute type of its first sharded parameter.
///
/// # Errors
///
/// [`Error::NotSharded`].
pub fn input_type<M: Module>(module: &M) -> Result<DType, Error> {
    let members = inspect::members(module);
    let first = members.first().ok_or(Error::NotSharded)?;
    Ok(first.slot().elements.compute.dtype)
}
