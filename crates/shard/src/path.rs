//! Walks over a module that know where they are.
//!
//! Burn tells its visitors and mappers what they enter and leave, one name at a time. Here that is
//! done once: a [`Visitor`] or [`Mapper`] gets each float tensor with its [`Place`].

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::Tensor;

use crate::parameter::CONTAINER;

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

/// Reads the float tensors of a module.
pub(crate) trait Visitor {
    /// A tensor at `place`.
    fn float<const D: usize>(&mut self, place: &Place, param: &Param<Tensor<D>>);

    /// From `place`, its part `name` is about to be entered; `container` is what `place` is called.
    fn enter(&mut self, _place: &Place, _name: &str, _container: &str) {}

    /// `place` is about to be left.
    fn exit(&mut self, _place: &Place) {}
}

/// Replaces the float tensors of a module.
pub(crate) trait Mapper {
    /// What becomes of the tensor at `place`.
    fn float<const D: usize>(&mut self, place: &Place, param: Param<Tensor<D>>)
    -> Param<Tensor<D>>;
}

/// Shows all float tensors of `module`, those of reparameterizations included.
pub(crate) fn visit<M: Module>(module: &M, visitor: &mut impl Visitor) {
    module.visit(&mut Walk {
        place: Place::default(),
        by: visitor,
    });
}

/// The module with its float tensors as `mapper` makes them.
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
}
