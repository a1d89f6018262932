//! Units: by paths, by patterns, and in loops.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_fsdp_collectives::{LaunchConfig, OperationKind, ProcessGroup, launch};
use burn_fsdp_spmd::passes::Units;
use burn_fsdp_spmd::passes::schedule::Options;
use burn_fsdp_spmd::{Error, Mode, Strategy, compile};

use crate::agreement::{agrees, vectors};
use crate::compiled::seeded;
use crate::eager::adamw;

#[derive(Module, Debug)]
struct Net {
    one: Linear,
    two: Linear,
    three: Linear,
    four: Linear,
}

#[derive(Module, Debug)]
struct Wrapped {
    net: Net,
}

impl Wrapped {
    fn new(device: &Device) -> Self {
        let layer = || LinearConfig::new(5, 5).init(device);
        let net = Net {
            one: layer(),
            two: layer(),
            three: layer(),
            four: layer(),
        };
        Self { net }
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        let net = &self.net;
        let layers = [&net.one, &net.two, &net.three, &net.four];
        let y = layers.iter().fold(x, |x, layer| layer.forward(x).tanh());
        y.sub_scalar(0.2).square().mean()
    }
}

#[derive(Module, Debug)]
struct Looped<const LAYERS: usize> {
    layers: Vec<Linear>,
}

impl<const LAYERS: usize> Looped<LAYERS> {
    fn new(device: &Device) -> Self {
        let layers = (0..LAYERS).map(|_| LinearConfig::new(5, 5).init(device));
        Self {
            layers: layers.collect(),
        }
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        let rounds = (0..20).flat_map(|_| &self.layers);
        let y = rounds.fold(x, |x, layer| layer.forward(x).tanh());
        y.sub_scalar(0.2).square().mean()
    }
}

/// Counts the all-gathers of one step on two ranks.
fn gathers<M: Module + 'static>(
    init: fn(&Device) -> M,
    loss: fn(&M, Tensor<2>) -> Tensor<1>,
    units: Units,
) -> u64 {
    let body = move |world: ProcessGroup| -> Result<u64, Error> {
        let device = Device::flex();
        let mut options = Options::default();
        options.units = units.clone();
        let mode = Mode::data_parallel(world.clone(), Strategy::FullShard);
        let mode = mode.options(options).verified();
        let mut step = compile(init, loss, adamw().build(), mode)?;
        let batch = vectors(0, 0..3, &device);
        step.step(1e-2, &batch)?;
        let before = world.counts();
        step.step(1e-2, &batch)?;
        let gathers = OperationKind::AllGather;
        Ok(world.counts().of(gathers).operations - before.of(gathers).operations)
    };
    let counts = launch(LaunchConfig::new(2), body).unwrap();
    assert_eq!(counts[0], counts[1]);
    counts[0]
}

#[test]
fn a_wrapped_model_is_not_one_unit() {
    let _guard = seeded();
    let count = |units| gathers(Wrapped::new, Wrapped::loss, units);
    // Each unit in forward. Of the two that are gone then, backward reads the second one's weights.
    assert_eq!(count(Units::by_path()), 4 + 1);
    agrees("a wrapped model", Wrapped::new, Wrapped::loss, vectors);
}

#[test]
fn users_can_name_the_units() {
    let _guard = seeded();
    let count = |patterns: &[&str]| {
        let units = Units::matching(patterns.iter().copied());
        gathers(Wrapped::new, Wrapped::loss, units)
    };
    assert_eq!(count(&["net"]), 1);
    assert_eq!(count(&["**"]), 4 + 1);
    // The root contains the first and the last layer, and is gathered for each.
    assert_eq!(count(&["net.t*"]), 4);
    let world = ProcessGroup::solo();
    let mut options = Options::default();
    options.units = Units::matching(["blocks.*"]);
    let mode = Mode::data_parallel(world, Strategy::FullShard).options(options);
    let mut step = compile(Wrapped::new, Wrapped::loss, adamw().build(), mode).unwrap();
    let error = step.step(1e-2, &vectors(0, 0..3, &Device::flex()));
    let text = error.unwrap_err().to_string();
    assert!(
        text.contains("blocks.*") && text.contains("net.one"),
        "{text}"
    );
}

#[test]
fn units_in_a_loop_are_gathered_twice_at_most() {
    let _guard = seeded();
    let count = gathers(Looped::<2>::new, Looped::loss, Units::by_path());
    assert_eq!(count, 2);
    // When the first unit comes back, the others are still there; in backward all are.
    let count = gathers(Looped::<3>::new, Looped::loss, Units::by_path());
    assert_eq!(count, 4);
    let count = gathers(Looped::<5>::new, Looped::loss, Units::by_path());
    assert_eq!(count, 5 + 3);
    agrees("a loop", Looped::<3>::new, Looped::loss, vectors);
}
