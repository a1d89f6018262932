//! `save` and `resume`: whole trainings, and what goes wrong on one rank.

use std::path::Path;
use std::sync::Arc;

use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Int, Tensor};
use burn_fsdp::steps::Checkpoints;
use burn_fsdp::{
    CheckpointError, LaunchConfig, Mesh, ProcessGroup, ProcessMesh, ShardPolicy, backward,
    fully_shard, launch, resume, save,
};
use burn_fsdp_models::{Gpt, GptConfig};

const CONFIG: GptConfig = GptConfig {
    vocab: 19,
    seq: 8,
    layers: 2,
    heads: 2,
    dim: 6,
};

fn optimizer() -> ModuleOptimizer {
    AdamWConfig::new().with_epsilon(1e-3).init()
}

/// The same on every rank, so that the mean over the ranks does not depend on their number.
fn loss(model: &Gpt, step: u64, device: &Device) -> Tensor<1> {
    let tokens = |start: u64| {
        let start = start as i64;
        let tokens = Tensor::<1, Int>::arange(start..start + 16, device);
        tokens.remainder_scalar(19).reshape([2, 8])
    };
    model.loss(tokens(step), tokens(step + 1))
}

fn device() -> Device {
    Device::flex().autodiff().gradient_checkpointing()
}

/// Ranks in a line, or in two equal lines that hold the same.
#[derive(Debug, Clone, Copy)]
enum Ranks {
    Line(usize),
    Copies(usize),
}

impl Ranks {
    fn number(self) -> usize {
        match self {
            Self::Line(ranks) => ranks,
            Self::Copies(ranks) => 2 * ranks,
        }
    }

    fn divided(self, world: &ProcessGroup) -> Result<(ProcessMesh, Gpt), CheckpointError> {
        let policy = ShardPolicy::new().units(["blocks.*"]);
        let (mesh, policy) = match self {
            Self::Line(ranks) => (Mesh::line("shard", ranks)?, policy),
            Self::Copies(ranks) => (
                Mesh::new([("replicate", 2), ("shard", ranks)])?,
                policy.replicate_axis("replicate"),
            ),
        };
        let mesh = ProcessMesh::new(world, mesh)?;
        let model = CONFIG.init(&device(), 4).expect("valid sizes");
        let model = fully_shard(model, &mesh, policy)?;
        Ok((mesh, model))
    }
}

/// Goes on from the folder, saves into it, and returns rank 0's losses.
fn train(folder: &Path, ranks: Ranks, until: u64) -> Vec<f32> {
    let folder = folder.to_owned();
    let losses = launch(LaunchConfig::new(ranks.number()), move |world| {
        let (mesh, model) = ranks.divided(&world)?;
        let resumed = resume(&folder, model, optimizer(), &mesh)?;
        let (mut model, mut optimizer) = (resumed.model, resumed.optimizer);
        let mut losses = Vec::new();
        for step in resumed.step..until {
            let loss = loss(&model, step, &device());
            losses.push(loss.clone().into_scalar::<f32>());
            let gradients = backward(loss, &model)?;
            model = optimizer.step(1e-2, model, gradients);
        }
        let saved = save(&folder, until, &model, &optimizer, &mesh)?;
        assert_eq!(saved.step, until);
        Ok::<_, CheckpointError>(losses)
    });
    losses.unwrap_or_else(|error| panic!("{error}")).remove(0)
}

fn plain_losses(until: u64) -> Vec<f32> {
    let device = Device::flex().autodiff();
    let mut model = CONFIG.init(&device, 4).expect("valid sizes");
    let mut optimizer = optimizer();
    let step = |step| {
        let loss = loss(&model, step, &device);
        let value = loss.clone().into_scalar::<f32>();
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-2, model.clone(), gradients);
        value
    };
    (0..until).map(step).collect()
}

#[test]
fn a_training_in_pieces_is_the_training_of_plain_burn() {
    let want = plain_losses(6);
    for pieces in [
        [Ranks::Line(1), Ranks::Line(1), Ranks::Line(1)],
        [Ranks::Line(2), Ranks::Line(3), Ranks::Line(1)],
        [Ranks::Copies(2), Ranks::Line(4), Ranks::Copies(1)],
    ] {
        let folder = tempfile::tempdir().expect("a folder");
        let mut got = Vec::new();
        for (ranks, until) in pieces.into_iter().zip([2, 4, 6]) {
            got.extend(train(folder.path(), ranks, until));
        }
        assert_eq!(got.len(), want.len());
        for (step, (got, want)) in got.iter().zip(&want).enumerate() {
            let is_alone = pieces.iter().all(|ranks| ranks.number() == 1);
            let same = match is_alone {
                true => got.to_bits() == want.to_bits(),
                false => (got / want - 1.0).abs() < 1e-5,
            };
            assert!(same, "{pieces:?}, step {step}: {got}, plain {want}");
        }
    }
}

/// What each rank says when all do the same, and this is no error of the launch.
fn messages(
    ranks: usize,
    body: impl Fn(ProcessGroup) -> Result<(), CheckpointError> + Send + Sync + 'static,
) -> Vec<String> {
    let results = launch(LaunchConfig::new(ranks), move |world| {
        let message = body(world).err().map(|error| error.to_string());
        Ok::<_, CheckpointError>(message.unwrap_or_default())
    });
    results.unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn ranks_must_mean_the_same_step() {
    let folder = tempfile::tempdir().expect("a folder");
    let to = folder.path().to_owned();
    let said = messages(3, move |world| {
        let (mesh, model) = Ranks::Line(3).divided(&world)?;
        let step = if world.rank() == 1 { 8 } else { 7 };
        save(&to, step, &model, &optimizer(), &mesh).map(drop)
    });
    for message in said {
        assert!(
            message.contains("7 on all ranks") && message.contains("8 on rank 1"),
            "{message}"
        );
    }
    assert_eq!(
        std::fs::read_dir(folder.path()).expect("readable").count(),
        0
    );
}

#[test]
fn a_step_that_is_there_is_not_replaced() {
    let folder = tempfile::tempdir().expect("a folder");
    train(folder.path(), Ranks::Line(2), 3);
    let to = folder.path().to_owned();
    let said = messages(2, move |world| {
        let (mesh, model) = Ranks::Line(2).divided(&world)?;
        save(&to, 3, &model, &optimizer(), &mesh).map(drop)
    });
    for message in said {
        assert!(message.contains("step-000003"), "{message}");
    }
}

#[test]
fn damage_that_one_rank_reads_is_an_error_on_all() {
    let folder = tempfile::tempdir().expect("a folder");
    train(folder.path(), Ranks::Line(2), 2);
    let step = Checkpoints::new(folder.path()).newest().expect("saved");
    let weight = step.index().tensor("head.weight").expect("a weight");
    let part = weight.parts.iter().find(|part| part.file == 1);
    let first = part.expect("the half of rank 1").bytes.start as usize;
    let file = step.path().join("rank-00001.safetensors");
    let mut bytes = std::fs::read(&file).expect("a file of rank 1");
    bytes[first] ^= 1;
    std::fs::write(&file, bytes).expect("writable");
    let from = folder.path().to_owned();
    let said = messages(4, move |world| {
        let (mesh, model) = Ranks::Line(4).divided(&world)?;
        resume(&from, model, optimizer(), &mesh).map(drop)
    });
    for message in &said {
        assert!(message.contains("rank-00001.safetensors"), "{message}");
    }
    // Of four shards, the first lies in what rank 0 of two has written, and the others reach into what rank 1 has.
    let only_heard: Vec<_> = said.iter().map(|m| m.contains(" failed: ")).collect();
    assert!(only_heard[0] && only_heard.contains(&false), "{said:?}");
}

#[test]
fn a_folder_that_cannot_be_read_is_an_error_on_all() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("file");
    std::fs::write(&file, "no folder").expect("writable");
    let file = Arc::new(file);
    let said = messages(2, move |world| {
        let (mesh, model) = Ranks::Line(2).divided(&world)?;
        resume(&*file, model, optimizer(), &mesh).map(drop)
    });
    for message in said {
        assert!(message.contains("file"), "{message}");
    }
}

#[test]
fn a_mesh_without_the_usual_axis_is_refused_by_name() {
    let said = messages(2, move |world| {
        let layout = Mesh::new([("rows", 1), ("columns", 2)])?;
        let mesh = ProcessMesh::new(&world, layout)?;
        let model = CONFIG.init(&device(), 4).expect("valid sizes");
        let model = fully_shard(model, &mesh, ShardPolicy::new().axis("columns"))?;
        save("nowhere", 1, &model, &optimizer(), &mesh).map(drop)
    });
    for message in said {
        assert!(
            message.contains("rows, columns") && message.contains("`snapshot`"),
            "{message}"
        );
    }
}
