//! Sharding changes where numbers are computed, but not the numbers.

use burn::module::Module;
use burn_fsdp_collectives::{LaunchConfig, ProcessGroup, launch, launcher_ranks};
use burn_fsdp_shard::{Cut, Error, ShardPolicy, Strategy};

use super::bench::{Case, Outcome, assert_close, is_host, joined, plainly, sharded, trained_by};
use super::launcher;
use super::nets::{CONV_NET, MLP, RECURRENT};

const TOLERANCE: f32 = 1e-5;
/// Fewer steps on a device, which may be a software device.
fn steps() -> usize {
    if is_host() { 10 } else { 3 }
}

/// The ranks of a training run that is compared with one without sharding.
trait Ranks {
    fn agree<M: Module + 'static>(&self, case: Case<M>, policy: &ShardPolicy);
}

/// Threads of this process, 1 to 4 of them.
struct Threads;

impl Ranks for Threads {
    fn agree<M: Module + 'static>(&self, case: Case<M>, policy: &ShardPolicy) {
        for ranks in if is_host() { 1..=4 } else { 2..=2 } {
            let want = plainly(case, ranks, steps());
            let got = sharded(case, ranks, steps(), policy.clone());
            assert_close(&got, &want, TOLERANCE);
        }
    }
}

/// The ranks of a group, including this one.
impl Ranks for ProcessGroup {
    fn agree<M: Module + 'static>(&self, case: Case<M>, policy: &ShardPolicy) {
        let want = plainly(case, self.size(), steps());
        let own = trained_by(self, case, steps(), policy.clone()).expect("it trains");
        assert_close(&joined(&outcomes_of_all(self, own)), &want, TOLERANCE);
    }
}

/// The outcomes of all ranks.
fn outcomes_of_all(world: &ProcessGroup, own: Outcome) -> Vec<Outcome> {
    let bytes = |values: &[f32]| -> Vec<u8> {
        values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect()
    };
    let floats = |bytes: &[u8]| -> Vec<f32> {
        let (values, _) = bytes.as_chunks();
        values
            .iter()
            .map(|value| f32::from_le_bytes(*value))
            .collect()
    };
    let all = |values: &[f32]| -> Vec<Vec<f32>> {
        let notes = world.exchange("outcome", bytes(values)).expect("all come");
        notes.iter().map(|note| floats(note)).collect()
    };
    let losses = all(&own.losses).into_iter();
    let mut outcomes: Vec<_> = losses
        .map(|losses| Outcome {
            losses,
            params: Vec::new(),
        })
        .collect();
    for (path, values) in &own.params {
        for (outcome, values) in outcomes.iter_mut().zip(all(values)) {
            outcome.params.push((path.clone(), values));
        }
    }
    outcomes
}

fn residual_network(ranks: &impl Ranks) {
    ranks.agree(MLP, &ShardPolicy::new().units(["blocks.*"]));
}

fn every_strategy_and_layout(ranks: &impl Ranks) {
    let policy = ShardPolicy::new().units(["blocks.*"]);
    ranks.agree(MLP, &policy.clone().strategy(Strategy::ShardGradOp));
    ranks.agree(MLP, &policy.clone().strategy(Strategy::NoShard));
    ranks.agree(MLP, &policy.clone().cut(Cut::Dims));
    // Only the embedding is large enough to be cut.
    ranks.agree(MLP, &policy.clone().whole_below(106));
    ranks.agree(MLP, &policy.clone().shard_vectors(true));
    // One of the first two is the default, for threads or for processes.
    ranks.agree(MLP, &policy.clone().prefetch(0));
    ranks.agree(MLP, &policy.clone().prefetch(1));
    ranks.agree(MLP, &policy.clone().prefetch(3));
    ranks.agree(MLP, &policy.reshard_root(true));
}

fn one_unit(ranks: &impl Ranks) {
    ranks.agree(MLP, &ShardPolicy::new());
}

fn units_inside_units(ranks: &impl Ranks) {
    let units = ["blocks", "blocks.*", "blocks.*.up", "head"];
    ranks.agree(MLP, &ShardPolicy::new().units(units));
}

fn convolutions(ranks: &impl Ranks) {
    ranks.agree(CONV_NET, &ShardPolicy::new().units(["convs.*"]));
}

fn recurrent_network(ranks: &impl Ranks) {
    ranks.agree(RECURRENT, &ShardPolicy::new().units(["layers.*"]));
}

#[test]
fn residual_network_agrees() {
    residual_network(&Threads);
}

#[test]
fn every_strategy_and_layout_agrees() {
    every_strategy_and_layout(&Threads);
}

#[test]
fn one_unit_agrees() {
    one_unit(&Threads);
}

#[test]
fn units_inside_units_agree() {
    units_inside_units(&Threads);
}

#[test]
fn convolutions_agree() {
    convolutions(&Threads);
}

#[test]
fn recurrent_network_agrees() {
    recurrent_network(&Threads);
}

#[test]
fn processes_agree() {
    if launcher::scene().is_none() {
        for processes in [2, 4] {
            launcher::again_as_processes(processes, "parity::processes_agree");
        }
        return;
    }
    let size = launcher_ranks().expect("started among others");
    let body = |world: ProcessGroup| {
        residual_network(&world);
        every_strategy_and_layout(&world);
        one_unit(&world);
        units_inside_units(&world);
        convolutions(&world);
        recurrent_network(&world);
        Ok::<_, Error>(())
    };
    launch(LaunchConfig::new(size), body).unwrap_or_else(|error| panic!("{error}"));
}
