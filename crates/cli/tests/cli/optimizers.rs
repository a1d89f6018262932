//! `--optimizer` and `--no-decay`: the same losses as plain Burn with the same optimizers and groups, in both engines.

use burn::module::{Module, ModuleVisitor, Param, ParamGroup};
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    AdaGradConfig, AdamConfig, AdamWConfig, AdanConfig, GradientsParams, LionConfig,
    ModuleOptimizer, MuonConfig, Optimizer, RmsPropConfig, SgdConfig,
};
use burn::tensor::{Device, Tensor};
use burn_fsdp_models::{Batches, GptConfig, LanguageModel, TokenStream};
use serde_json::Value;

use crate::command::{Folder, last_report, losses, relative_difference, warnings};

const GPT: GptConfig = GptConfig {
    layers: 2,
    dim: 12,
    heads: 2,
    vocab: 31,
    seq: 5,
};
const ROWS: usize = 12;
const STEPS: usize = 5;
const RUN: &str = "train --layers 2 --dim 12 --heads 2 --vocab 31 --seq 5 --batch 12 --seed 3 \
                   --synthetic --warmup 0";

fn report(folder: &Folder, flags: &str) -> Value {
    let run = folder.run(&format!("{RUN} {flags} --json"));
    assert_eq!(run.code, 0, "{flags}: {}", run.stderr);
    last_report(&run)
}

/// Returns the paths of the model's parameters that a predicate on path and number of dims selects.
fn paths(is_chosen: impl Fn(&str, usize) -> bool) -> Vec<String> {
    struct Paths<F>(Vec<String>, Vec<String>, F);
    impl<F: Fn(&str, usize) -> bool> ModuleVisitor for Paths<F> {
        fn visit_float<const D: usize>(&mut self, _: &Param<Tensor<D>>) {
            let path = self.0.join(".");
            if self.2(&path, D) {
                self.1.push(path);
            }
        }
        fn enter_module(&mut self, name: &str, _: &str) {
            self.0.push(name.to_owned());
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.0.pop();
        }
    }
    let mut paths = Paths(Vec::new(), Vec::new(), is_chosen);
    GPT.init(&Device::flex(), 3).unwrap().visit(&mut paths);
    assert!(!paths.1.is_empty());
    paths.1
}

/// Returns the losses of plain Burn on one rank, with the whole batch.
fn plainly(mut optimizer: ModuleOptimizer, rate: impl Fn(usize) -> f64) -> Vec<f64> {
    let device = Device::flex().autodiff();
    let mut model = GPT.init(&device, 3).unwrap();
    let batches = Batches {
        stream: TokenStream::Synthetic { vocab: GPT.vocab },
        batch: ROWS,
        seq: GPT.seq,
    };
    let losses = (0..STEPS).map(|step| {
        let (inputs, targets) = batches.rows(step, 0..ROWS).to_tensors(&device);
        let loss = model.mean_loss(inputs, targets);
        let value = loss.clone().into_scalar::<f32>();
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(rate(step), model.clone(), gradients);
        f64::from(value)
    });
    losses.collect()
}

fn adamw(decay: f32) -> AdamWConfig {
    let adamw = AdamWConfig::new().with_epsilon(0.01);
    adamw.with_weight_decay(decay)
}

fn sgd(momentum: Option<f64>, decay: f32) -> SgdConfig {
    let momentum = momentum.map(|momentum| {
        let config = MomentumConfig::new().with_momentum(momentum);
        config.with_dampening(0.0)
    });
    let sgd = SgdConfig::new().with_momentum(momentum);
    sgd.with_weight_decay((decay > 0.0).then(|| WeightDecayConfig::new(decay)))
}

fn muon(momentum: f64, decay: f32) -> MuonConfig {
    let config = MomentumConfig::new().with_momentum(momentum);
    let config = config.with_dampening(0.0).with_nesterov(true);
    let muon = MuonConfig::new().with_momentum(config);
    muon.with_weight_decay((decay > 0.0).then(|| WeightDecayConfig::new(decay)))
}

/// Combines two optimizers: one for all parameters, and one for a group.
fn two(all: impl Optimizer, of: Vec<String>, one: impl Optimizer) -> ModuleOptimizer {
    ModuleOptimizer::from(all).with_group(ParamGroup::from_paths(of), one, None)
}

fn vectors() -> Vec<String> {
    paths(|_, dims| dims == 1)
}

fn matrices() -> Vec<String> {
    paths(|path, dims| dims == 2 && path.starts_with("blocks."))
}

/// Returns the flags, the equivalent optimizer of plain Burn, and the number of values that it keeps for each element.
fn settings() -> Vec<(&'static str, ModuleOptimizer, usize)> {
    let added = |decay| Some(WeightDecayConfig::new(decay));
    let adam = || AdamConfig::new().with_epsilon(0.01);
    let rmsprop = || RmsPropConfig::new().with_momentum(0.0).with_epsilon(0.01);
    let adagrad = || AdaGradConfig::new().with_epsilon(0.01);
    let adan = || AdanConfig::new().with_epsilon(0.01);
    let norms = || paths(|path, _| path.contains(".ln1."));
    vec![
        ("--lr 0.01 --eps 0.01", adamw(0.01).init(), 2),
        (
            "--lr 0.01 --eps 0.01 --weight-decay 3 --no-decay vectors",
            two(adamw(3.0).build(), vectors(), adamw(0.0).build()),
            2,
        ),
        (
            "--lr 0.01 --eps 0.01 --weight-decay 3 --no-decay blocks.*.ln1",
            two(adamw(3.0).build(), norms(), adamw(0.0).build()),
            2,
        ),
        (
            "--lr 0.01 --eps 0.01 --weight-decay 3 --no-decay blocks.1 --no-decay vectors --optimizer adamw",
            two(
                adamw(3.0).build(),
                paths(|path, dims| dims == 1 || path.starts_with("blocks.1.")),
                adamw(0.0).build(),
            ),
            2,
        ),
        ("--lr 0.012 --eps 0.01 --optimizer adam", adam().init(), 2),
        (
            "--lr 0.01 --eps 0.01 --optimizer adam --beta1 0.7 --beta2 0.9 --weight-decay 0.5",
            adam()
                .with_beta_1(0.7)
                .with_beta_2(0.9)
                .with_weight_decay(added(0.5))
                .init(),
            2,
        ),
        (
            "--lr 0.01 --eps 0.01 --optimizer adam --weight-decay 0.5 --no-decay vectors",
            two(
                adam().with_weight_decay(added(0.5)).build(),
                vectors(),
                adam().build(),
            ),
            2,
        ),
        (
            "--lr 0.1 --optimizer sgd",
            sgd(Some(f64::from(0.9f32)), 0.0).init(),
            1,
        ),
        (
            "--lr 0.1 --optimizer sgd --momentum 0",
            sgd(None, 0.0).init(),
            0,
        ),
        (
            "--lr 0.1 --optimizer sgd --momentum 0.5 --weight-decay 0.5 --no-decay vectors",
            two(
                sgd(Some(0.5), 0.5).build(),
                vectors(),
                sgd(Some(0.5), 0.0).build(),
            ),
            1,
        ),
        (
            "--lr 0.005 --eps 0.01 --optimizer rmsprop",
            rmsprop().init(),
            1,
        ),
        (
            "--lr 0.005 --eps 0.01 --optimizer rmsprop --momentum 0.5 --beta2 0.9",
            rmsprop().with_momentum(0.5).with_alpha(0.9).init(),
            2,
        ),
        (
            "--lr 0.005 --eps 0.01 --optimizer rmsprop --weight-decay 0.5 --no-decay **.bias",
            two(
                rmsprop().with_weight_decay(added(0.5)).build(),
                paths(|path, _| path.ends_with(".bias")),
                rmsprop().build(),
            ),
            1,
        ),
        (
            "--lr 0.02 --eps 0.01 --optimizer adagrad",
            adagrad().init(),
            1,
        ),
        (
            "--lr 0.02 --eps 0.01 --optimizer adagrad --weight-decay 0.5 --no-decay vectors",
            two(
                adagrad().with_weight_decay(added(0.5)).build(),
                vectors(),
                adagrad().build(),
            ),
            1,
        ),
        ("--lr 0.005 --eps 0.01 --optimizer adan", adan().init(), 4),
        (
            "--lr 0.005 --eps 0.01 --optimizer adan --beta1 0.9 --beta2 0.8 --weight-decay 3 --no-decay vectors",
            two(
                adan()
                    .with_beta_1(0.9)
                    .with_beta_2(0.8)
                    .with_weight_decay(3.0)
                    .build(),
                vectors(),
                adan().with_beta_1(0.9).with_beta_2(0.8).build(),
            ),
            4,
        ),
        ("--lr 0.001 --optimizer lion", LionConfig::new().init(), 1),
        (
            "--lr 0.001 --optimizer lion --beta1 0.8 --beta2 0.9 --weight-decay 9 --no-decay vectors",
            {
                let lion = || LionConfig::new().with_beta_1(0.8).with_beta_2(0.9);
                two(
                    lion().with_weight_decay(9.0).build(),
                    vectors(),
                    lion().build(),
                )
            },
            1,
        ),
    ]
}

fn muons() -> Vec<(&'static str, ModuleOptimizer)> {
    let usual = f64::from(0.95f32);
    vec![
        (
            "--lr 0.01 --eps 0.01 --optimizer muon",
            two(adamw(0.01).build(), matrices(), muon(usual, 0.01).build()),
        ),
        (
            "--lr 0.01 --eps 0.01 --optimizer muon --momentum 0.5 --beta1 0.8 --weight-decay 3 --no-decay vectors",
            two(
                adamw(3.0).with_beta_1(0.8).build(),
                matrices(),
                muon(0.5, 3.0).build(),
            )
            .with_group(
                ParamGroup::from_paths(vectors()),
                adamw(0.0).with_beta_1(0.8).build(),
                None,
            ),
        ),
        (
            "--lr 0.01 --eps 0.01 --optimizer muon --weight-decay 3 --no-decay blocks.0",
            two(adamw(3.0).build(), matrices(), muon(usual, 3.0).build())
                .with_group(
                    ParamGroup::from_predicate("blocks.0."),
                    adamw(0.0).build(),
                    None,
                )
                .with_group(
                    ParamGroup::from_paths(paths(|path, dims| {
                        dims == 2 && path.starts_with("blocks.0.")
                    })),
                    muon(usual, 0.0).build(),
                    None,
                ),
        ),
    ]
}

fn rate_of(flags: &str) -> f64 {
    let mut words = flags.split_whitespace();
    let rate = words.by_ref().skip_while(|word| *word != "--lr").nth(1);
    rate.unwrap().parse().unwrap()
}

/// Trains in each of these ways, and returns those that deviate from plain Burn.
fn far(flags: &str, optimizer: &ModuleOptimizer, ways: &[&str]) -> Vec<String> {
    let want = plainly(optimizer.clone(), |_| rate_of(flags));
    let far = ways.iter().filter_map(|way| {
        let flags = format!("{flags} --steps {STEPS} {way}");
        let got = losses(&report(&Folder::new(), &flags));
        let difference = relative_difference(&want, &got);
        (difference.is_nan() || difference > 1e-5).then(|| format!("{flags}: {difference:e}"))
    });
    far.collect()
}

#[test]
fn losses_match_plain_burn_with_every_optimizer() {
    let ways = [
        "--ranks 1",
        "--ranks 3",
        "--ranks 4 --strategy shard-grad-op",
        "--ranks 2 --offload state",
        "--ranks 1 --compile",
        "--ranks 2 --compile --strategy no-shard",
        "--ranks 3 --compile",
        "--ranks 4 --compile",
    ];
    let mut wrong = Vec::new();
    let mut all: Vec<Vec<f64>> = Vec::new();
    for (flags, optimizer, _) in settings() {
        wrong.extend(far(flags, &optimizer, &ways));
        let losses = plainly(optimizer, |_| rate_of(flags));
        // All settings give different losses.
        let same = all
            .iter()
            .any(|other| relative_difference(other, &losses) < 1e-4);
        assert!(!same, "{flags}");
        all.push(losses);
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn muon_updates_block_matrices_and_adamw_the_rest() {
    let ways = [
        "--ranks 1",
        "--ranks 2",
        "--ranks 3",
        "--ranks 4 --strategy hybrid-shard",
        "--ranks 4 --strategy shard-grad-op",
        "--ranks 2 --strategy no-shard",
        "--ranks 3 --offload state",
        "--ranks 1 --compile --strategy no-shard",
        "--ranks 3 --compile --strategy no-shard",
        "--ranks 1 --compile",
        "--ranks 2 --compile",
        "--ranks 3 --compile --strategy shard-grad-op",
        "--ranks 4 --compile --strategy hybrid-shard",
    ];
    let mut wrong = Vec::new();
    for (flags, optimizer) in muons() {
        wrong.extend(far(flags, &optimizer, &ways));
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn a_rank_holds_the_states_that_its_optimizer_has() {
    for (flags, _, values) in settings() {
        for way in ["--ranks 1", "--ranks 1 --compile"] {
            let report = report(&Folder::new(), &format!("{flags} --steps 2 {way}"));
            let params = report["params"].as_u64().unwrap();
            let held = report["state_bytes"][0].as_u64().unwrap();
            // RmsProp stores the mean of squares under two names. The eager engine keeps it once, like Burn, and a
            // compiled step twice.
            let is_twice = flags.contains("rmsprop") && way.contains("--compile");
            let want = 4 * params * (1 + values as u64 + u64::from(is_twice));
            assert!(
                (want..want + 2000).contains(&held),
                "{flags} {way}: {held} is not {want}"
            );
        }
    }
}

#[test]
fn runs_resume_in_another_engine_with_every_optimizer() {
    let all = settings().into_iter();
    let all = all.map(|(flags, optimizer, _)| (flags, optimizer));
    for (flags, optimizer) in all.chain(muons()) {
        let want = plainly(optimizer, |_| rate_of(flags));
        for (first, second) in [
            ("--ranks 2", "--ranks 3 --compile"),
            ("--ranks 3 --compile", "--ranks 2"),
        ] {
            let folder = Folder::new();
            let run = format!("{flags} --checkpoint-dir steps");
            let before = report(&folder, &format!("{run} --steps 2 {first}"));
            let after = report(&folder, &format!("{run} --steps {STEPS} --resume {second}"));
            assert!(
                !warnings(&after)
                    .iter()
                    .any(|warning| warning.contains("was saved")),
                "{after}"
            );
            let got = [losses(&before), losses(&after)].concat();
            let difference = relative_difference(&want, &got);
            assert!(
                difference < 1e-5,
                "{flags}, {first} to {second}: {difference:e}"
            );
        }
    }
}

#[test]
fn plans_with_any_optimizer_and_groups_are_proved() {
    for (flags, ..) in settings() {
        let run = Folder::new().run(&format!(
            "{RUN} {flags} --steps 3 --ranks 3 --compile --certify"
        ));
        assert_eq!(run.code, 0, "{flags}: {}", run.stderr);
        let printed = format!("{}{}", run.stdout, run.stderr);
        let plans = printed.matches("proved: the plan of step ").count();
        assert_eq!(plans, 2, "{flags}: {printed}");
    }
}

#[test]
fn a_step_of_another_optimizer_is_refused() {
    let folder = Folder::new();
    report(&folder, "--steps 2 --checkpoint-dir steps");
    for engine in ["", "--compile"] {
        let run = format!("{RUN} --steps 3 --checkpoint-dir steps --resume {engine}");
        // Adam's state has the same names.
        for name in ["adam", "sgd"] {
            let run = folder.run(&format!("{run} --optimizer {name}"));
            assert_eq!(run.code, 2, "{}", run.stderr);
            assert!(
                run.stderr.contains("pass --optimizer adamw"),
                "{}",
                run.stderr
            );
        }
    }
}

#[test]
fn optimizer_flags_without_effect_are_rejected() {
    for (flags, words) in [
        (
            "--optimizer sgd --beta1 0.9",
            ["--beta1", "--optimizer sgd"],
        ),
        ("--optimizer sgd --eps 1e-8", ["--eps", "--optimizer sgd"]),
        ("--optimizer lion --eps 1e-8", ["--eps", "--optimizer lion"]),
        (
            "--optimizer adagrad --beta2 0.9",
            ["--beta2", "--optimizer adagrad"],
        ),
        (
            "--optimizer rmsprop --beta1 0.9",
            ["--beta1", "--optimizer rmsprop"],
        ),
        ("--momentum 0.9", ["--momentum", "--optimizer adamw"]),
        (
            "--optimizer adan --momentum 0.9",
            ["--momentum", "--optimizer adan"],
        ),
        (
            "--optimizer sgd --no-decay vectors",
            ["--no-decay", "--weight-decay of 0"],
        ),
        (
            "--weight-decay 0 --no-decay vectors",
            ["--no-decay", "--weight-decay of 0"],
        ),
        (
            "--no-decay blocks.*.nowhere",
            ["blocks.*.nowhere", "vectors"],
        ),
        ("--no-decay vector", ["\"vector\"", "vectors"]),
        ("--optimizer lbfgs", ["lbfgs", "muon"]),
        (
            "--optimizer sgd --momentum 1",
            ["--momentum is 1;", "must be"],
        ),
    ] {
        let folder = Folder::new();
        let run = folder.run(&format!("{RUN} {flags}"));
        assert_eq!(run.code, 2, "{flags}: {}", run.stderr);
        for word in words {
            assert!(run.stderr.contains(word), "{flags}: {}", run.stderr);
        }
        assert!(folder.names().is_empty(), "{flags}");
    }
}
