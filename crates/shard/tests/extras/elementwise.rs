//! The check whether optimizers may work on shards.

use burn::grad_clipping::GradientClipping;
use burn::module::{Module, ParamGroup};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    AdaGradConfig, AdafactorConfig, AdamConfig, AdamWConfig, AdanConfig, LambConfig, LionConfig,
    ModuleOptimizer, MuonConfig, RmsPropConfig, SgdConfig,
};
use burn_fsdp_shard::{
    Error, ShardPolicy, Strategy, backward, check_elementwise, check_same_optimizer,
};

use super::bench::{build, device, on_ranks};
use super::nets::{MLP, Mlp};

fn blocks() -> ShardPolicy {
    ShardPolicy::new().units(["blocks.*"])
}

/// The verdict on each of some optimizers, the same on all of two ranks.
fn verdicts(
    optimizers: fn() -> Vec<(&'static str, ModuleOptimizer)>,
    policy: ShardPolicy,
) -> Vec<(&'static str, Option<String>)> {
    let by_rank = on_ranks(2, move |world| {
        let model = build(MLP, &world, &device(), policy.clone())?;
        let verdict = |(name, optimizer): (_, ModuleOptimizer)| {
            let verdict = check_elementwise(&model, &optimizer);
            (name, verdict.err().map(|error| error.to_string()))
        };
        Ok(optimizers().into_iter().map(verdict).collect::<Vec<_>>())
    });
    assert_eq!(by_rank[0], by_rank[1]);
    by_rank.into_iter().next().expect("a rank")
}

fn elementwise() -> Vec<(&'static str, ModuleOptimizer)> {
    let momentum = MomentumConfig::new().with_nesterov(true);
    vec![
        ("sgd", SgdConfig::new().init()),
        (
            "sgd with momentum",
            SgdConfig::new().with_momentum(Some(momentum)).init(),
        ),
        ("adam", AdamConfig::new().init()),
        ("adamw", AdamWConfig::new().with_weight_decay(0.1).init()),
        ("amsgrad", AdamWConfig::new().with_amsgrad(true).init()),
        ("adagrad", AdaGradConfig::new().init()),
        ("rmsprop", RmsPropConfig::new().init()),
        ("centered", RmsPropConfig::new().with_centered(true).init()),
        ("lion", LionConfig::new().init()),
        ("adan", AdanConfig::new().init()),
        (
            "clipping by value",
            AdamWConfig::new()
                .init()
                .with_grad_clipping(GradientClipping::Value(0.01)),
        ),
    ]
}

fn whole() -> Vec<(&'static str, ModuleOptimizer)> {
    let clipping = |threshold| {
        AdamWConfig::new()
            .init()
            .with_grad_clipping(GradientClipping::Norm(threshold))
    };
    vec![
        ("muon", MuonConfig::new().init()),
        ("adafactor", AdafactorConfig::new().init()),
        ("lamb", LambConfig::new().init()),
        ("clipping by norm", clipping(1.0)),
        (
            "signs, clipped by norm",
            LionConfig::new()
                .init()
                .with_grad_clipping(GradientClipping::Norm(0.05)),
        ),
        ("clipping by a large norm", clipping(1e12)),
    ]
}

#[test]
fn elementwise_optimizers_pass() {
    for (name, verdict) in verdicts(elementwise, blocks()) {
        assert_eq!(verdict, None, "{name}");
    }
}

#[test]
fn optimizers_that_need_whole_tensors_are_refused() {
    for (name, verdict) in verdicts(whole, blocks()) {
        let message = verdict.unwrap_or_else(|| panic!("{name} should be refused"));
        assert!(message.contains("`embed.weight`"), "{name}: {message}");
        assert!(message.contains("clip_grad_norm"), "{name}: {message}");
    }
}

#[test]
fn one_group_among_others_is_found_by_its_path() {
    let grouped = || {
        let hidden = ParamGroup::from_predicate("blocks.1.up.weight");
        let optimizer = || AdamWConfig::new().init();
        let muon = MuonConfig::new().build();
        let clipping = Some(GradientClipping::Norm(0.05));
        vec![
            ("muon", optimizer().with_group(hidden.clone(), muon, None)),
            (
                "signs, clipped by norm",
                optimizer().with_group(hidden, LionConfig::new().build(), clipping),
            ),
        ]
    };
    for (name, message) in verdicts(grouped, blocks()) {
        let message = message.unwrap_or_else(|| panic!("{name} should be refused"));
        assert!(
            message.contains("`blocks.1.up.weight`"),
            "{name}: {message}"
        );
    }
}

#[test]
fn whole_parameters_accept_any_optimizer() {
    let policies = [
        ShardPolicy::new().strategy(Strategy::NoShard),
        blocks().one_owner(["**"]),
        blocks().whole_below(1_000_000),
    ];
    for policy in policies {
        for (name, verdict) in verdicts(whole, policy) {
            assert_eq!(verdict, None, "{name}");
        }
    }
}

#[test]
fn checking_does_not_change_the_optimizer() {
    on_ranks(1, |world| {
        let device = device();
        let mut model = build(MLP, &world, &device, blocks())?;
        let mut optimizer = AdamWConfig::new().init();
        let gradients = backward(model.loss(0, 0, &device), &model)?;
        model = optimizer.step(1e-2, model, gradients);
        let before = optimizer.to_record().len();
        check_elementwise(&model, &optimizer)?;
        assert_eq!(optimizer.to_record().len(), before);
        assert!(before > 0);
        let frozen = model.freeze();
        check_elementwise(&frozen, &MuonConfig::new().init())?;
        let plain = check_elementwise(&Mlp::new(&device), &optimizer).expect_err("plain");
        assert!(matches!(plain, Error::NotSharded), "{plain}");
        Ok(())
    });
}

/// Returns the ranks' results if their optimizers differ by rank.
fn compared(policy: ShardPolicy, optimizer: fn(usize) -> ModuleOptimizer) -> Option<String> {
    let by_rank = on_ranks(3, move |world| {
        let model = build(MLP, &world, &device(), policy.clone())?;
        let verdict = check_same_optimizer(&model, &optimizer(world.rank()));
        Ok(verdict.err().map(|error| error.to_string()))
    });
    assert!(by_rank.iter().all(|verdict| *verdict == by_rank[0]));
    by_rank.into_iter().next().expect("a rank")
}

#[test]
fn optimizers_with_different_settings_are_distinguished() {
    let own = || blocks().one_owner(["**"]);
    assert_eq!(compared(blocks(), |_| AdamWConfig::new().init()), None);
    assert_eq!(compared(own(), |_| AdafactorConfig::new().init()), None);
    // One rank of three has another setting, another optimizer, or a group.
    let others: [fn(usize) -> ModuleOptimizer; 4] = [
        |rank| {
            let beta = if rank == 2 { 0.8 } else { 0.9 };
            AdamWConfig::new().with_beta_1(beta).init()
        },
        |rank| {
            let decay = if rank == 2 { 0.1 } else { 0.0 };
            AdamWConfig::new().with_weight_decay(decay).init()
        },
        |rank| match rank {
            2 => AdamConfig::new().init(),
            _ => SgdConfig::new().init(),
        },
        |rank| {
            let optimizer = AdamWConfig::new().init();
            let group = ParamGroup::from_paths(vec!["blocks.1.down.weight".to_owned()]);
            match rank {
                2 => optimizer.with_group(group, SgdConfig::new().build(), None),
                _ => optimizer,
            }
        },
    ];
    for (index, optimizer) in others.into_iter().enumerate() {
        let verdict = compared(blocks(), optimizer).unwrap_or_else(|| panic!("pair {index}"));
        assert!(verdict.contains("optimizer of rank 2"), "{verdict}");
    }
    let verdict = compared(own(), |rank| {
        let decay = if rank == 2 { -0.7 } else { -0.8 };
        AdafactorConfig::new().with_decay_rate(decay).init()
    });
    assert!(verdict.is_some(), "of what a rank owns, too");
}
