//! Types in which a leg computes and its gradients travel.

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{FloatDType, Tensor};
use burn_fsdp::Precision;
use proptest::prelude::*;
use proptest::sample::select;

use super::model::Plan;

/// The types of a leg; the module's types where nothing is set.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Halves {
    pub(crate) compute: Option<FloatDType>,
    pub(crate) reduce: Option<FloatDType>,
    /// One bit for each layer that computes in full; then the embedding and the head.
    full: u8,
    /// True if layers with states of the device's type also compute in halves, as they do in compiled steps.
    states: bool,
}

/// The bits of [`Halves::full`] that do not belong to a layer.
const EMBED: usize = 6;
const HEAD: usize = 7;

/// Types for an engine that computes in each of `types`.
pub(crate) fn halves(types: &'static [FloatDType]) -> impl Strategy<Value = Halves> {
    let reduced = [
        None,
        Some(FloatDType::F32),
        Some(types[0]),
        Some(types[types.len() - 1]),
    ];
    let compute = prop::option::weighted(0.85, select(types));
    let some = (compute, select(reduced.to_vec()), any::<[u8; 2]>());
    let some = some.prop_map(|(compute, reduce, full)| Halves {
        compute,
        reduce,
        full: full[0] & full[1],
        states: false,
    });
    prop_oneof![7 => Just(Halves::default()), 3 => some]
}

impl Halves {
    pub(crate) fn with_states(self, states: bool) -> Self {
        Self { states, ..self }
    }

    pub(crate) fn are_used(self) -> bool {
        self.compute.is_some() || self.reduce.is_some()
    }

    /// Returns true if losses are scaled, as 16-bit types with few exponent bits need it.
    pub(crate) fn are_scaled(self) -> bool {
        [self.compute, self.reduce].contains(&Some(FloatDType::F16))
    }

    /// The relative distance of numbers of the narrowest type.
    pub(crate) fn rounding(self) -> f32 {
        let types = [self.compute, self.reduce];
        if types.contains(&Some(FloatDType::BF16)) {
            return 2_f32.powi(-8);
        }
        if self.are_scaled() {
            2_f32.powi(-11)
        } else {
            f32::EPSILON
        }
    }

    pub(crate) fn of_layer(self, plan: &Plan, layer: usize) -> Option<FloatDType> {
        let kind = plan.layers[layer];
        // In a compiled step, all recurrent layers compute in one type.
        let mut layers = plan.layers.iter().enumerate();
        let is_bit_set = |layer: usize| self.full >> layer & 1 == 1;
        let is_one_full = layers.any(|(layer, kind)| kind.is_recurrent() && is_bit_set(layer));
        let is_full = kind.computes_in_full() && !self.states;
        self.of(layer, is_full || kind.is_recurrent() && is_one_full)
    }

    pub(crate) fn of_embedding(self) -> Option<FloatDType> {
        self.of(EMBED, false)
    }

    pub(crate) fn of_head(self, plan: &Plan) -> Option<FloatDType> {
        if plan.has_head() {
            self.of(HEAD, false)
        } else {
            self.of_embedding()
        }
    }

    /// Returns the type in which a part computes, if types matter.
    fn of(self, bit: usize, is_full: bool) -> Option<FloatDType> {
        let compute = self.compute?;
        Some(if is_full || self.full >> bit & 1 == 1 {
            FloatDType::F32
        } else {
            compute
        })
    }

    /// Returns the type in which the parameter at `path` computes.
    pub(crate) fn computes(self, plan: &Plan, path: &[String]) -> FloatDType {
        let of = match path[0].as_str() {
            "embed" => self.of_embedding(),
            "head" => self.of_head(plan),
            _ => self.of_layer(plan, path[1].parse().expect("the number of a layer")),
        };
        of.unwrap_or(FloatDType::F32)
    }

    /// Returns the type in which the gradient of the parameter at `path` travels.
    pub(crate) fn travels(self, plan: &Plan, path: &[String]) -> FloatDType {
        self.reduce.unwrap_or_else(|| self.computes(plan, path))
    }

    /// Configures the same types in an engine.
    pub(crate) fn precision(self, plan: &Plan) -> Precision {
        let layers = 0..plan.layers.len();
        let in_full = |dtype: Option<FloatDType>| dtype == Some(FloatDType::F32);
        let layers = layers.filter(|layer| plan.has_params(*layer));
        let layers = layers.filter(|layer| in_full(self.of_layer(plan, *layer)));
        let mut full: Vec<_> = layers.map(|layer| format!("layers.{layer}")).collect();
        if in_full(self.of_embedding()) {
            full.push("embed".to_owned());
            // Another field for the same parameter.
            full.extend(plan.has_units("table").then(|| "table".to_owned()));
        }
        if plan.has_head() && in_full(self.of_head(plan)) {
            full.push("head".to_owned());
        }
        let precision = match self.compute {
            Some(compute) => Precision::new(compute).full_in(full),
            None => Precision::default(),
        };
        match self.reduce {
            Some(reduce) => precision.reduce(reduce),
            None => precision,
        }
    }

    /// Returns a module whose parameters are casts of the parameters of `module`, to which their gradients
    /// come back.
    pub(crate) fn cast<M: Module>(self, plan: &Plan, module: M) -> M {
        match self.compute {
            Some(_) => module.map(&mut Cast {
                halves: self,
                plan,
                path: Vec::new(),
            }),
            None => module,
        }
    }
}

struct Cast<'a> {
    halves: Halves,
    plan: &'a Plan,
    path: Vec<String>,
}

impl ModuleMapper for Cast<'_> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        // Clones share running states.
        let is_running = self.path.iter().any(|name| name.starts_with("running"));
        match self.halves.computes(self.plan, &self.path) {
            _ if is_running => param,
            FloatDType::F32 => param,
            compute => Param::initialized(param.id, param.val().cast(compute)),
        }
    }
}

/// Returns `x` in a type, if one is given.
pub(crate) fn cast<const D: usize>(x: Tensor<D>, dtype: Option<FloatDType>) -> Tensor<D> {
    match dtype {
        Some(dtype) if x.dtype() != dtype.into() => x.cast(dtype),
        _ => x,
    }
}
