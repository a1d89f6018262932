//! Optimizers that need whole tensors, detected at their first step.

use burn::grad_clipping::GradientClipping;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamGroup};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    AdaGradConfig, AdafactorConfig, AdamConfig, AdamWConfig, AdanConfig, GradientsAccumulator,
    LambConfig, LionConfig, ModuleOptimizer, MuonConfig, RmsPropConfig, SgdConfig,
};
use burn::tensor::Tensor;
use burn_fsdp_collectives::ProcessGroup;
use burn_fsdp_shard::{
    Error, ShardPolicy, Strategy, backward, catch, check_elementwise, params_with_gradient,
};

use super::bench::{build, device, on_ranks, whole_params};
use super::nets::{MLP, Mlp};

type Make = fn() -> ModuleOptimizer;

const WHOLE: [(&str, Make); 5] = [
    ("muon", || MuonConfig::new().init()),
    ("adafactor", || AdafactorConfig::new().init()),
    ("lamb", || LambConfig::new().init()),
    ("clipping by norm", clipping),
    ("signs, clipped by norm", || {
        let optimizer = LionConfig::new().init();
        optimizer.with_grad_clipping(GradientClipping::Norm(0.05))
    }),
];

fn clipping() -> ModuleOptimizer {
    let optimizer = AdamWConfig::new().init();
    optimizer.with_grad_clipping(GradientClipping::Norm(1.0))
}

const ELEMENTWISE: [(&str, Make); 11] = [
    ("sgd", || SgdConfig::new().init()),
    ("sgd with momentum", || {
        let momentum = MomentumConfig::new().with_nesterov(true);
        SgdConfig::new().with_momentum(Some(momentum)).init()
    }),
    ("adam", || AdamConfig::new().init()),
    ("adamw", || AdamWConfig::new().with_weight_decay(0.1).init()),
    ("amsgrad", || AdamWConfig::new().with_amsgrad(true).init()),
    ("adagrad", || AdaGradConfig::new().init()),
    ("rmsprop", || RmsPropConfig::new().init()),
    ("centered", || {
        RmsPropConfig::new().with_centered(true).init()
    }),
    ("lion", || LionConfig::new().init()),
    ("adan", || AdanConfig::new().init()),
    ("clipping by value", || {
        let optimizer = AdamWConfig::new().init();
        optimizer.with_grad_clipping(GradientClipping::Value(0.01))
    }),
];

fn blocks() -> ShardPolicy {
    ShardPolicy::new().units(["blocks.*"])
}

/// Steps with the learning rates `rates`.
fn stepped(
    mut model: Mlp,
    optimizer: &mut ModuleOptimizer,
    world: &ProcessGroup,
    rates: &[f64],
) -> Result<Mlp, Error> {
    for (step, rate) in rates.iter().enumerate() {
        let gradients = backward(model.loss(world.rank(), step, &device()), &model)?;
        model = catch(|| optimizer.step(*rate, model, gradients))?;
    }
    Ok(model)
}

/// Returns the error of the steps, on each rank.
fn refusals(ranks: usize, policy: ShardPolicy, make: Make, rates: &'static [f64]) -> Vec<bool> {
    on_ranks(ranks, move |world| {
        let model = build(MLP, &world, &device(), policy.clone())?;
        match stepped(model, &mut make(), &world, rates) {
            Ok(_) => Ok(false),
            Err(error) => {
                assert!(matches!(error, Error::WholeTensors { .. }), "{error}");
                Ok(true)
            }
        }
    })
}

#[test]
fn optimizers_of_whole_tensors_are_detected_in_the_first_step() {
    for ranks in 1..=3 {
        for (name, make) in WHOLE {
            let refused = refusals(ranks, blocks(), make, &[1e-2]);
            assert_eq!(refused, vec![true; ranks], "{name}");
        }
    }
}

#[test]
fn a_zero_learning_rate_defers_detection() {
    for (name, make) in WHOLE {
        // Muon fails on flat tensors, whatever the rate.
        if name != "muon" {
            let still = refusals(2, blocks(), make, &[0.0, 0.0]);
            assert_eq!(still, [false; 2], "{name}");
        }
        let refused = refusals(2, blocks(), make, &[0.0, 0.0, 1e-2]);
        assert_eq!(refused, [true; 2], "{name}");
    }
    for (name, make) in ELEMENTWISE {
        let refused = refusals(2, blocks(), make, &[0.0, 0.0, 1e-2, 1e-2]);
        assert_eq!(refused, [false; 2], "{name}");
    }
}

/// A whole parameter is the same to the optimizer as before.
#[test]
fn whole_parameters_are_not_probed() {
    let whole = [
        ShardPolicy::new().strategy(Strategy::NoShard),
        ShardPolicy::new().one_owner(["**"]),
    ];
    for policy in whole {
        // Muon accepts no vectors, on any rank.
        for (name, make) in WHOLE.into_iter().filter(|(name, _)| *name != "muon") {
            let refused = refusals(2, policy.clone().units(["blocks.*"]), make, &[1e-2, 1e-2]);
            assert_eq!(refused, [false; 2], "{name}");
        }
        for (name, make) in ELEMENTWISE {
            let refused = refusals(2, policy.clone(), make, &[1e-2, 1e-2]);
            assert_eq!(refused, [false; 2], "{name}");
        }
    }
}

/// One parameter among many, chosen by its exact path and by a pattern, and all but one.
#[test]
fn one_group_among_others_is_noticed() {
    let one: fn() -> ParamGroup = || ParamGroup::from_path("blocks.1.up.weight");
    let others = || ParamGroup::all().exclude(ParamGroup::from_path("embed.weight"));
    let pattern = || ParamGroup::from_predicate("blocks.1.up.weight");
    for ranks in 1..=3 {
        for (group, found) in [
            (one, "`blocks.1.up.weight`"),
            (pattern, "`blocks.1.up.weight`"),
            (others, "`blocks.0.up.weight`"),
        ] {
            on_ranks(ranks, move |world| {
                let model = build(MLP, &world, &device(), blocks())?;
                let lamb = LambConfig::new().build();
                let mut optimizer = AdamWConfig::new().init().with_group(group(), lamb, None);
                let refused = stepped(model, &mut optimizer, &world, &[1e-2]);
                let error = refused.expect_err("a group of whole tensors").to_string();
                assert!(error.contains(found), "{error}");
                Ok(())
            });
        }
    }
}

/// Frozen parameters are tried when they are trained.
#[test]
fn parameters_trained_later_are_probed_then() {
    on_ranks(2, |world| {
        let mut model = build(MLP, &world, &device(), blocks())?;
        model.blocks[1] = model.blocks[1].clone().freeze();
        let late = ParamGroup::from_predicate("blocks.1");
        let lamb = LambConfig::new().build();
        let mut optimizer = AdamWConfig::new().init().with_group(late, lamb, None);
        let mut model = stepped(model, &mut optimizer, &world, &[1e-2, 1e-2])?;
        model.blocks[1] = model.blocks[1].clone().unfreeze();
        let refused = stepped(model, &mut optimizer, &world, &[1e-2]);
        let error = refused.expect_err("a group of whole tensors");
        assert!(matches!(error, Error::WholeTensors { .. }), "{error}");
        Ok(())
    });
}

fn groups() -> ModuleOptimizer {
    let lion = LionConfig::new().build();
    let adan = AdanConfig::new().build();
    let decayed = AdamWConfig::new().with_weight_decay(0.1).init();
    let decayed = decayed.with_group(ParamGroup::from_predicate("blocks.0"), lion, None);
    decayed.with_group(ParamGroup::from_path("blocks.1.up.weight"), adan, None)
}

/// The states are as many and the bits the same as after an explicit check.
#[test]
fn probing_does_not_change_elementwise_steps() {
    for ranks in 1..=3 {
        let with_groups: (_, Make) = ("groups", groups);
        for (name, make) in ELEMENTWISE.into_iter().chain([with_groups]) {
            for (asked, unasked) in on_ranks(ranks, move |world| {
                let device = device();
                let run = |asks: bool| {
                    let model = build(MLP, &world, &device, blocks())?;
                    let mut optimizer = make();
                    if asks {
                        check_elementwise(&model, &optimizer)?;
                    }
                    let model = stepped(model, &mut optimizer, &world, &[1e-2, 1e-2, 1e-2])?;
                    Ok::<_, Error>(whole_params(Mlp::new(&device), &model))
                };
                Ok((run(true)?, run(false)?))
            }) {
                assert_eq!(asked, unasked, "{name}");
            }
        }
    }
}

/// Counts parameters of more than one dimension, which are the sharded ones.
struct Matrices(usize);

impl ModuleVisitor for Matrices {
    fn visit_float<const D: usize>(&mut self, _param: &Param<Tensor<D>>) {
        self.0 += usize::from(D > 1);
    }
}

/// Probes have gradients until the first step.
#[test]
fn probes_have_gradients_until_the_first_step() {
    on_ranks(2, |world| {
        let device = device();
        let model = build(MLP, &world, &device, blocks())?;
        let mut optimizer = AdamWConfig::new().init();
        let gradients = backward(model.loss(world.rank(), 0, &device), &model)?;
        let own = params_with_gradient(&model, &gradients).len();
        let mut matrices = Matrices(0);
        Mlp::new(&device).visit(&mut matrices);
        assert_eq!(gradients.len(), own + 5 * matrices.0);
        let model = optimizer.step(1e-2, model, gradients);
        let gradients = backward(model.loss(world.rank(), 1, &device), &model)?;
        assert_eq!(gradients.len(), own);

        let model = build(MLP, &world, &device, blocks())?;
        let gradients = backward(model.loss(world.rank(), 0, &device), &model)?;
        let mut accumulator = GradientsAccumulator::new();
        accumulator.accumulate(&model, gradients);
        assert_eq!(accumulator.grads().len(), own);
        check_elementwise(&model, &optimizer)?;
        let gradients = backward(model.loss(world.rank(), 1, &device), &model)?;
        assert_eq!(gradients.len(), own);
        Ok(())
    });
}

/// An accumulator's gradients lack those for the matrices of the trial.
#[test]
fn an_optimizer_that_panics_at_a_shard_is_named() {
    on_ranks(2, |world| {
        let device = device();
        let accumulated = |model: &Mlp| {
            let mut accumulator = GradientsAccumulator::new();
            let loss = model.loss(world.rank(), 0, &device);
            accumulator.accumulate(model, backward(loss, model)?);
            Ok::<_, Error>(accumulator.grads())
        };
        let model = build(MLP, &world, &device, blocks())?;
        let gradients = accumulated(&model)?;
        let refused = catch(|| MuonConfig::new().init().step(1e-2, model, gradients));
        let error = refused.expect_err("muon");
        assert!(matches!(error, Error::Untried { .. }), "{error}");
        let text = error.to_string();
        for words in ["2D tensors", "check_elementwise", "one_owner"] {
            assert!(text.contains(words), "{text}");
        }
        Ok(())
    });
}

/// Changes everything that it is shown, with or without a gradient.
struct Halve;

impl ModuleMapper for Halve {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|value| value.inner().mul_scalar(0.5).autodiff().require_grad())
    }
}

#[test]
fn another_map_is_not_taken_for_an_optimizer() {
    on_ranks(2, |world| {
        let device = device();
        let model = build(MLP, &world, &device, ShardPolicy::new())?;
        let gradients = backward(model.loss(world.rank(), 0, &device), &model)?;
        let model = model.map(&mut Halve);
        let mut optimizer = LambConfig::new().init();
        let refused = catch(|| optimizer.step(1e-2, model, gradients));
        let error = refused.expect_err("the first step");
        assert!(matches!(error, Error::WholeTensors { .. }), "{error}");
        Ok(())
    });
}
