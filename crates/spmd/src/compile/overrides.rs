//! Modules that replace others while a step is traced.

use std::collections::BTreeSet;
use std::iter;

use burn::module::{Module, ParamId};

use crate::error::{Error, OverrideError};
use crate::graph::Graph;
use crate::trace::ParameterSpec;

/// A module that is traced in place of the step's module, and a rewrite of the traced graph.
///
/// The two modules may have different types. For example, a generic model may replace a part that reads values on the
/// host and cannot be traced. Parameters and buffers of both modules are matched by path. All tensors of the step's
/// module must exist in the other module with the same shapes and types. They start with the values that the step's
/// `init` creates. Checkpoints, [`CompiledStep::parameter`](crate::CompiledStep::parameter) and evaluations with either
/// module use these paths. Tensors that the other module adds become part of the step, after the module's own. An added
/// tensor starts with its value in the other module on rank 0, and is trained if that module requires its gradient.
/// [`CompiledStep::parameters`](crate::CompiledStep::parameters) and checkpoints contain it under its path.
///
/// `()` overrides nothing, and a pair applies its overrides in order. A part whose type is not a generic parameter
/// cannot be replaced with another type; the model then needs a runtime switch.
///
/// ```
/// use burn::module::Module;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::optim::SgdConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_fsdp_spmd::{Mode, Override, compile_with};
///
/// #[derive(Module, Debug)]
/// struct Model<P: Module> {
///     fc: Linear,
///     part: P,
/// }
///
/// /// Reads a value on the host.
/// #[derive(Module, Debug)]
/// struct Checks;
///
/// /// Reads nothing on the host.
/// #[derive(Module, Debug)]
/// struct Trusts;
///
/// struct DoNotCheck;
///
/// impl Override<Model<Checks>> for DoNotCheck {
///     type Traced = Model<Trusts>;
///
///     fn replace(&self, module: Model<Checks>) -> Model<Trusts> {
///         Model { fc: module.fc, part: Trusts }
///     }
/// }
///
/// let mut step = compile_with(
///     |device: &Device| Model { fc: LinearConfig::new(3, 1).init(device), part: Checks },
///     |model: &Model<Trusts>, x: Tensor<2>| model.fc.forward(x).square().mean(),
///     SgdConfig::new().build(),
///     Mode::single(),
///     DoNotCheck,
/// )?;
/// step.step(1e-2, &Tensor::ones([8, 3], &Device::flex()))?;
/// # Ok::<(), burn_fsdp_spmd::Error>(())
/// ```
pub trait Override<M: Module>: Send {
    /// The module that is traced.
    type Traced: Module + 'static;

    /// Returns the module to trace instead. It is called on devices that compute nothing. If it adds parameters, it is
    /// called once more on rank 0 for their values.
    fn replace(&self, module: M) -> Self::Traced;

    /// Rewrites the traced graph before any pass. The default changes nothing. Changes after the insertion of
    /// collectives belong in a [transform](crate::Mode::transform) of the mode.
    ///
    /// # Errors
    ///
    /// If the override cannot rewrite the graph.
    fn rewrite(&self, graph: Graph) -> Result<Graph, Error> {
        Ok(graph)
    }
}

impl<M: Module + 'static> Override<M> for () {
    type Traced = M;

    fn replace(&self, module: M) -> M {
        module
    }
}

impl<M: Module, A: Override<M>, B: Override<A::Traced>> Override<M> for (A, B) {
    type Traced = B::Traced;

    fn replace(&self, module: M) -> B::Traced {
        self.1.replace(self.0.replace(module))
    }

    fn rewrite(&self, graph: Graph) -> Result<Graph, Error> {
        self.1.rewrite(self.0.rewrite(graph)?)
    }
}

/// Returns the tensors that the traced module adds to the step's tensors.
///
/// # Errors
///
/// [`OverrideError`] if it lacks a tensor of the step, or has it with another type, shape or kind.
pub(super) fn added(
    own: &[(ParamId, ParameterSpec)],
    traced: Vec<(ParamId, ParameterSpec)>,
) -> Result<Vec<(ParamId, ParameterSpec)>, Error> {
    for (_, spec) in own {
        let path = spec.path.to_string();
        let Some((_, other)) = traced.iter().find(|(_, other)| other.path == spec.path) else {
            return Err(OverrideError::Lacks { path }.into());
        };
        // The other module may share it among different fields.
        let tied = spec.tied.clone();
        if (ParameterSpec {
            tied,
            ..other.clone()
        }) != *spec
        {
            return Err(OverrideError::Differs {
                path,
                expected: described(spec),
                got: described(other),
            }
            .into());
        }
    }
    let is_own = |other: &ParameterSpec| own.iter().any(|(_, spec)| spec.path == other.path);
    let added = traced.into_iter().filter(|(_, other)| !is_own(other));
    let added = added.map(|(id, other)| {
        let spec = ParameterSpec {
            is_added: true,
            ..other
        };
        (id, spec)
    });
    Ok(added.collect())
}

/// Rejects states of passes whose paths are not unique among the step's tensors.
pub(super) fn check_pass_states(
    own: &[ParameterSpec],
    states: &[ParameterSpec],
) -> Result<(), Error> {
    let mut paths: BTreeSet<&str> = own
        .iter()
        .flat_map(|spec| iter::once(&spec.path).chain(&spec.tied))
        .map(|path| &**path)
        .collect();
    match states.iter().find(|state| !paths.insert(&state.path)) {
        None => Ok(()),
        Some(state) => Err(Error::DuplicateName {
            what: "tensor of the module or state of a pass",
            name: state.path.to_string(),
        }),
    }
}

fn described(spec: &ParameterSpec) -> String {
    let kind = match (spec.is_buffer, spec.is_trained) {
        (true, _) => "buffer",
        (false, true) => "trained parameter",
        (false, false) => "frozen parameter",
    };
    format!("a {kind} {:?} {:?}", spec.dtype, spec.shape)
}
