//! Walks over a module that track the current path.
//!
//! Burn notifies visitors and mappers when they enter and leave a module, one name at a time. This file keeps track of
//! the names, so a [`Visitor`] or [`Mapper`] gets each tensor with its [`Location`].

use burn::module::{Flag, Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Bool, Int, Tensor};

use crate::ambient::{Purpose, within};

/// Name of the reparameterization that the engine attaches to a parameter.
pub(crate) const NAME: &str = "fsdp";
/// Burn's name for the container of a reparameterization in visits and maps.
pub(crate) const CONTAINER: &str = "Reparameterization";

/// Burn's path of an adapter's first factor, relative to the adapted parameter.
pub(crate) const FACTOR_A: &str = "lora.a";
/// Path of the second factor.
pub(crate) const FACTOR_B: &str = "lora.b";
/// Path of an adapter's magnitudes.
pub(crate) const MAGNITUDE: &str = "lora.magnitude";

/// A position in a module during a walk.
#[derive(Debug, Default)]
pub(crate) struct Location {
    names: Vec<String>,
    reparameterizations: usize,
}

impl Location {
    /// Returns the path, such as `blocks.3.fc.weight`.
    pub(crate) fn path(&self) -> String {
        self.names.join(".")
    }

    /// Returns the path of the enclosing module at `depth`: the first `depth` names.
    pub(crate) fn path_to(&self, depth: usize) -> String {
        self.names[..depth].join(".")
    }

    /// Returns true if the position is inside a reparameterization.
    pub(crate) fn is_nested(&self) -> bool {
        self.reparameterizations > 0
    }

    fn enter(&mut self, name: &str, container: &str) {
        self.reparameterizations += usize::from(container == CONTAINER);
        self.names.push(name.to_owned());
    }

    fn exit(&mut self, container: &str) {
        self.reparameterizations -= usize::from(container == CONTAINER);
        self.names.pop();
    }
}

/// Reads the tensors of a module during a walk.
pub(crate) trait Visitor {
    /// Visits the float tensor at `place`.
    fn float<const D: usize>(&mut self, place: &Location, param: &Param<Tensor<D>>);

    /// Visits the integer tensor at `place`.
    fn int<const D: usize>(&mut self, _place: &Location, _param: &Param<Tensor<D, Int>>) {}

    /// Visits the boolean tensor at `place`.
    fn bool<const D: usize>(&mut self, _place: &Location, _param: &Param<Tensor<D, Bool>>) {}

    /// Enters the part `name` at `place`, whose kind Burn names `container`.
    fn enter(&mut self, _place: &Location, _name: &str, _container: &str) {}

    /// Leaves the part at `place`.
    fn exit(&mut self, _place: &Location) {}
}

/// Replaces the tensors of a module during a walk.
pub(crate) trait Mapper {
    /// Returns the new float tensor for `place`.
    fn float<const D: usize>(
        &mut self,
        place: &Location,
        param: Param<Tensor<D>>,
    ) -> Param<Tensor<D>>;

    /// Returns the new integer tensor for `place`.
    fn int<const D: usize>(
        &mut self,
        _place: &Location,
        param: Param<Tensor<D, Int>>,
    ) -> Param<Tensor<D, Int>> {
        param
    }

    /// Returns the new boolean tensor for `place`.
    fn bool<const D: usize>(
        &mut self,
        _place: &Location,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        param
    }

    /// Returns the new flag for `place`.
    fn flag(&mut self, _place: &Location, flag: Param<Flag>) -> Param<Flag> {
        flag
    }
}

/// Visits all tensors of `module`, including those in reparameterizations.
pub(crate) fn visit<M: Module>(module: &M, visitor: &mut impl Visitor) {
    module.visit(&mut Walk {
        place: Location::default(),
        by: visitor,
    });
}

/// Returns the module with its tensors replaced by `mapper`.
pub(crate) fn map<M: Module>(module: M, mapper: &mut impl Mapper) -> M {
    within(Purpose::Map, || {
        module.map(&mut Walk {
            place: Location::default(),
            by: mapper,
        })
    })
}

/// A Burn walk that tracks the location for a visitor or mapper.
struct Walk<'a, V> {
    place: Location,
    by: &'a mut V,
}

impl<V: Visitor> ModuleVisitor for Walk<'_, V> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.by.enter(&self.place, name, container);
        self.place.enter(name, container);
    }

    fn exit_module(&mut self, _name: &str, container: &str) {
        self.by.exit(&self.place);
        self.place.exit(container);
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.by.float(&self.place, param);
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.by.int(&self.place, param);
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.by.bool(&self.place, param);
    }
}

impl<P: Mapper> ModuleMapper for Walk<'_, P> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.place.enter(name, container);
    }

    fn exit_module(&mut self, _name: &str, container: &str) {
        self.place.exit(container);
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.by.float(&self.place, param)
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        self.by.int(&self.place, param)
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        self.by.bool(&self.place, param)
    }

    fn map_flag(&mut self, flag: Param<Flag>) -> Param<Flag> {
        self.by.flag(&self.place, flag)
    }
}
