//! `save`, `resume` and `Checkpointer`: whole training runs, and errors on one rank.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use burn::module::Lora;
use burn_fsdp::checkpoint::{Checkpoints, snapshot};
use burn_fsdp::internals::checkpoint::{NotFiniteTensor, SaveRemark, SaveRequest, TrainingState};
use burn_fsdp::{
    Checkpointer, Error, LaunchConfig, Mesh, ProcessGroup, ProcessMesh, ShardPolicy, backward,
    fully_shard, launch, resume, save,
};
use burn_fsdp_models::Gpt;

use crate::common::{CONFIG, device, loss, optimizer, trained_plainly};

/// Ranks in a line, or in two equal lines that hold the same values.
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

    fn divided(self, world: &ProcessGroup) -> Result<(ProcessMesh, Gpt), Error> {
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

/// Continues from the folder, saves into it, and returns rank 0's losses.
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
        Ok::<_, Error>(losses)
    });
    losses.unwrap_or_else(|error| panic!("{error}")).remove(0)
}

#[test]
fn resumed_training_matches_plain_burn() {
    let (_, want) = trained_plainly(6);
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
            let same = if is_alone {
                got.to_bits() == want.to_bits()
            } else {
                (got / want - 1.0).abs() < 1e-5
            };
            assert!(same, "{pieces:?}, step {step}: {got}, plain {want}");
        }
    }
}

/// The message of each rank when all do the same, without an error of the launch.
fn messages(
    ranks: usize,
    body: impl Fn(ProcessGroup) -> Result<(), Error> + Send + Sync + 'static,
) -> Vec<String> {
    let results = launch(LaunchConfig::new(ranks), move |world| {
        let message = body(world).err().map(|error| error.to_string());
        Ok::<_, Error>(message.unwrap_or_default())
    });
    results.unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn ranks_must_agree_on_the_step() {
    let folder = tempfile::tempdir().expect("a folder");
    let to = folder.path().to_owned();
    let said = messages(3, move |world| {
        let (mesh, model) = Ranks::Line(3).divided(&world)?;
        let step = if world.rank() == 1 { 8 } else { 7 };
        save(&to, step, &model, &optimizer(), &mesh)?;
        Ok(())
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
fn an_existing_step_is_not_replaced() {
    let folder = tempfile::tempdir().expect("a folder");
    train(folder.path(), Ranks::Line(2), 3);
    let to = folder.path().to_owned();
    let said = messages(2, move |world| {
        let (mesh, model) = Ranks::Line(2).divided(&world)?;
        save(&to, 3, &model, &optimizer(), &mesh)?;
        Ok(())
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
        resume(&from, model, optimizer(), &mesh)?;
        Ok(())
    });
    for message in &said {
        assert!(message.contains("rank-00001.safetensors"), "{message}");
    }
    // Of four shards, the first is in the data that rank 0 of two has written, and the others reach into rank 1's.
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
        resume(&*file, model, optimizer(), &mesh)?;
        Ok(())
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
        save("nowhere", 1, &model, &optimizer(), &mesh)?;
        Ok(())
    });
    for message in said {
        assert!(
            message.contains("rows, columns") && message.contains("`snapshot`"),
            "{message}"
        );
    }
}

/// Saves the given steps with a `Checkpointer`; if a `rank` is given, it has a weight that is not a number.
fn save_in_background(
    world: &ProcessGroup,
    folder: &Path,
    steps: &[u64],
    spoilt: Option<usize>,
) -> Result<(Vec<Option<NotFiniteTensor>>, Checkpointer), Error> {
    let (mesh, model) = Ranks::Line(world.size()).divided(world)?;
    let deadline = Duration::from_secs(60);
    let mut saves = Checkpointer::new(world, Checkpoints::new(folder), deadline)?;
    let mut seen = Vec::new();
    for (index, &step) in steps.iter().enumerate() {
        let mut taken = snapshot(&model, &optimizer(), mesh.mesh(), "shard")?;
        if spoilt == Some(world.rank()) {
            let part = &taken.plan.of_rank(world.rank())[0];
            let tensor = &taken.plan.tensors()[part.tensor];
            let bytes = f32::NAN.to_le_bytes().repeat(tensor.shape.iter().product());
            let snapshot = &mut taken.snapshot;
            snapshot.insert(&tensor.name, part.region.clone(), bytes);
        }
        let offered = saves.offer(taken)?;
        seen.push(offered.not_finite().cloned());
        let training = TrainingState {
            step,
            optimizer: offered.taken().optimizer.clone(),
            ..TrainingState::default()
        };
        let request = SaveRequest::new(offered.taken().plan.clone(), training);
        if offered.not_finite().is_none() {
            saves.begin(offered, request, index + 1 == steps.len())?;
        }
        saves.poll();
    }
    Ok((seen, saves))
}

#[test]
fn steps_are_saved_while_training_continues() {
    let folder = tempfile::tempdir().expect("a folder");
    let to = folder.path().to_owned();
    launch(LaunchConfig::new(3), move |world| {
        let (seen, mut saves) = save_in_background(&world, &to, &[2, 4, 6], None)?;
        assert_eq!(seen, [None, None, None]);
        assert!(saves.finish()?.is_none());
        assert_eq!(saves.newest(), Some(6));
        assert!(saves.remarks().is_empty());
        Ok::<_, Error>(())
    })
    .unwrap_or_else(|error| panic!("{error}"));
    let steps = Checkpoints::new(folder.path()).steps().expect("readable");
    assert_eq!(steps, [2, 4, 6]);
}

#[test]
fn failed_saves_are_remarks_but_the_last_one_is_an_error() {
    let folder = tempfile::tempdir().expect("a folder");
    train(folder.path(), Ranks::Line(2), 3);
    let to = folder.path().to_owned();
    launch(LaunchConfig::new(2), move |world| {
        // The folder has step 3, saved by the previous ranks.
        let (_, mut saves) = save_in_background(&world, &to, &[3, 5, 3], None)?;
        // The end reports the failure, whether it is noticed earlier or only at the end.
        for _ in 0..20 {
            saves.poll();
            std::thread::sleep(Duration::from_millis(10));
        }
        let failure = saves.finish()?.expect("step 3 is there");
        assert!(failure.to_string().contains("step-000003"), "{failure}");
        // Rank 0 knows that another attempt would fail.
        assert_eq!(
            Checkpointer::may_be_tried_again(&failure),
            world.rank() != 0
        );
        assert_eq!(saves.newest(), Some(5));
        let remarks = saves.remarks();
        assert!(
            matches!(remarks[..], [SaveRemark::Failed(_)]),
            "{remarks:?}"
        );
        Ok::<_, Error>(())
    })
    .unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn a_non_finite_tensor_is_reported_on_all_ranks() {
    let folder = tempfile::tempdir().expect("a folder");
    let to = folder.path().to_owned();
    let seen = launch(LaunchConfig::new(3), move |world| {
        let (mut seen, mut saves) = save_in_background(&world, &to, &[1], Some(1))?;
        assert!(saves.finish()?.is_none());
        assert_eq!(saves.newest(), None);
        Ok::<_, Error>(seen.remove(0).expect("not finite"))
    });
    let seen = seen.unwrap_or_else(|error| panic!("{error}"));
    for not_finite in &seen {
        assert_eq!(not_finite.rank, 1);
        assert_eq!(not_finite, &seen[0]);
    }
}

/// Alpha is not a tensor of the model, and a different alpha means a different model.
#[test]
fn adapters_of_another_alpha_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    for (alpha, ranks) in [(4.0, 2), (4.0, 1), (3.0, 1), (3.0, 2)] {
        let folder = folder.path().to_owned();
        let resumed = launch(LaunchConfig::new(ranks), move |world| {
            let mesh = ProcessMesh::new(&world, Mesh::line("shard", ranks)?)?;
            let policy = ShardPolicy::new().units(["blocks.*"]);
            let policy = policy.lora(Lora::new(2, alpha));
            let model = CONFIG.init(&device(), 4).expect("valid sizes");
            let model = fully_shard(model, &mesh, policy)?;
            let resumed = resume(&folder, model, optimizer(), &mesh)?;
            save(
                &folder,
                resumed.step + 1,
                &resumed.model,
                &resumed.optimizer,
                &mesh,
            )?;
            Ok::<_, Error>(())
        });
        match alpha {
            3.0 => {
                let message = resumed.expect_err("refused").to_string();
                let says =
                    "a scale (alpha over rank) of 2, but the model's adapter has a scale of 1.5";
                assert!(message.contains(says), "{message}");
            }
            _ => drop(resumed.unwrap_or_else(|error| panic!("{error}"))),
        }
    }
}
