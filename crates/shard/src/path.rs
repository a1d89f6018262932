//! Walks over a module that know where they are.
//!
//! Burn tells its visitors and mappers what they enter and leave, one name at a time. Here that is
//! done once: a [`Visitor`] or [`Mapper`] gets each tensor with its [`Place`].

use burn::module::{Flag, Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Bool, Int, Tensor};

/// Name of the reparameterization that the engine attaches to a parameter.
pub(crate) const NAME: &str = "fsdp";
/// What Burn calls the container of a reparameterization while visiting and mapping.
pub(crate) const CONTAINER: &str = "Reparameterization";

/// Where a walk over a module is.
#[derive(Debug, Default)]
pub(crate) struct Place {
    names: Vec<String>,
    reparameterizations: usize,
}

impl Place {
    /// The path, such as `blocks.3.fc.weight`.
    pub(crate) fn path(&self) -> String {
        self.names.join(".")
    }

    /// Whether this is a part of a reparameterization and not of the module itself.
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

/// Reads the tensors of a module.
pub(crate) trait Visitor {
    /// A tensor at `place`.
    fn float<const D: usize>(&mut self, place: &Place, param: &Param<Tensor<D>>);

    /// A tensor of integers at `place`.
    fn int<const D: usize>(&mut self, _place: &Place, _param: &Param<Tensor<D, Int>>) {}

    /// A tensor of booleans at `place`.
    fn bool<const D: usize>(&mut self, _place: &Place, _param: &Param<Tensor<D, Bool>>) {}

    /// From `place`, its part `name` is about to be entered; `container` is what `place` is called.
    fn enter(&mut self, _place: &Place, _name: &str, _container: &str) {}

    /// `place` is about to be left.
    fn exit(&mut self, _place: &Place) {}
}

/// Replaces the tensors of a module.
pub(crate) trait Mapper {
    /// What becomes of the tensor at `place`.
    fn float<const D: usize>(&mut self, place: &Place, param: Param<Tensor<D>>)
    -> Param<Tensor<D>>;

    /// What becomes of the tensor of integers at `place`.
    fn int<const D: usize>(
        &mut self,
        _place: &Place,
        param: Param<Tensor<D, Int>>,
    ) -> Param<Tensor<D, Int>> {
        param
    }

    /// What becomes of the tensor of booleans at `place`.
    fn bool<const D: usize>(
        &mut self,
        _place: &Place,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        param
    }

    /// What becomes of the flag at `place`.
    fn flag(&mut self, _place: &Place, flag: Param<Flag>) -> Param<Flag> {
        flag
    }
}

/// Shows all tensors of `module`, those of reparameterizations included.
pub(crate) fn visit<M: Module>(module: &M, visitor: &mut impl Visitor) {
    module.visit(&mut Walk {
        place: Place::default(),
        by: visitor,
    });
}

/// The module with its tensors as `mapper` makes them.
pub(crate) fn map<M: Module>(module: M, mapper: &mut impl Mapper) -> M {
    module.map(&mut Walk {
        place: Place::default(),
        by: mapper,
    })
}

/// Keeps the place for whoever walks.
struct Walk<'a, V> {
    place: Place,
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
