//! Weights from PyTorch and to PyTorch, and back again.
//!
//! `data/torch_gpt.safetensors` was written by `torch_peer.py train` with PyTorch 2.15. Tests that run PyTorch print
//! that they are skipped if it is not installed. `BURN_FSDP_PYTHON` names a Python that has it.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use burn_fsdp::Mesh;
use burn_fsdp::checkpoint::Checkpoints;
use burn_fsdp::internals::checkpoint::{
    Alone, Dtype, SaveRequest, Snapshot, TensorKind, TensorSpec, TrainingState, WritePlan,
    save_step,
};
use burn_fsdp::internals::mesh::{Layout, Region};
use serde_json::Value;

use crate::command::{Folder, crate_folder, losses, relative_difference};
use crate::skipped::python;

const TORCH_FILE: &[u8] = include_bytes!("../data/torch_gpt.safetensors");

/// The output of `torch_peer.py losses data/torch_gpt.safetensors 2 6` with PyTorch 2.15.
const TORCH_LOSSES: [f64; 6] = [
    2.955_392_122_268_676_8,
    3.017_248_868_942_260_7,
    2.925_808_191_299_438_5,
    2.815_637_350_082_397_5,
    2.768_806_695_938_110_4,
    2.685_388_803_482_055_7,
];

/// Together with the arguments of all tests of the command: the model and the training of `torch_peer.py`.
const TRAIN: &str = "--synthetic --warmup 0 --seq 12 --batch 4";

/// Shape and bytes of each tensor.
type Tensors = BTreeMap<String, (Value, Vec<u8>)>;

fn read_file(folder: &Folder, name: &str) -> Tensors {
    let (header, data) = folder.weights(name);
    let mut header: BTreeMap<String, Value> = serde_json::from_str(&header).expect("a header");
    header.remove("__metadata__");
    let tensors = header.into_iter().map(|(name, entry)| {
        assert_eq!(entry["dtype"], "F32", "{name}");
        let offset = |index: usize| entry["data_offsets"][index].as_u64().expect("an offset");
        let bytes = data[offset(0) as usize..offset(1) as usize].to_vec();
        (name, (entry["shape"].clone(), bytes))
    });
    tensors.collect()
}

/// Reads a folder in Hugging Face's format by its index.
fn read_folder(folder: &Folder, name: &str) -> Tensors {
    let index = folder.read(&format!("{name}/model.safetensors.index.json"));
    let index: Value = serde_json::from_str(&index).expect("an index");
    let map = index["weight_map"].as_object().expect("a map");
    let tensors: Tensors = map
        .iter()
        .map(|(tensor, file)| {
            let file = format!("{name}/{}", file.as_str().expect("a name"));
            let entry = read_file(folder, &file).remove(tensor);
            (tensor.clone(), entry.expect("where the index says"))
        })
        .collect();
    let size: usize = tensors.values().map(|(_, bytes)| bytes.len()).sum();
    assert_eq!(index["metadata"]["total_size"], size);
    tensors
}

fn consolidate(folder: &Folder, arguments: &str) {
    let run = folder.run(&format!("consolidate {arguments}"));
    assert_eq!(run.code, 0, "{arguments}: {}", run.stderr);
}

#[test]
fn weights_of_pytorch_round_trip_byte_for_byte() {
    let folder = Folder::new();
    folder.write("torch.safetensors", TORCH_FILE);
    let want = read_file(&folder, "torch.safetensors");
    for (number, extra) in ["--ranks 1", "--ranks 4", "--ranks 2 --compile"]
        .into_iter()
        .enumerate()
    {
        // A learning rate of zero changes nothing.
        let run = format!("{TRAIN} --vocab 29 --lr 0 --steps 1 --checkpoint-dir steps{number}");
        folder.report(&format!("{run} --init torch.safetensors {extra}"));
        consolidate(&folder, &format!("steps{number} one{number}.safetensors"));
        assert!(
            read_file(&folder, &format!("one{number}.safetensors")) == want,
            "{extra}"
        );
        consolidate(
            &folder,
            &format!("steps{number} many{number} --max-shard-size 5KB"),
        );
        let many = format!("many{number}");
        assert!(folder.names_in(&many).len() > 3, "several files");
        assert!(read_folder(&folder, &many) == want, "{extra}");
    }
    let (header, _) = folder.weights("one0.safetensors");
    assert!(header.contains("\"format\":\"pt\""), "{header}");
}

#[test]
fn weights_of_pytorch_train_as_in_pytorch() {
    let folder = Folder::new();
    folder.write("torch.safetensors", TORCH_FILE);
    for extra in ["--ranks 1", "--ranks 2", "--ranks 4 --compile"] {
        let report = folder.report(&format!(
            "{TRAIN} --vocab 29 --init torch.safetensors --steps 6 {extra}"
        ));
        let difference = relative_difference(&TORCH_LOSSES, &losses(&report));
        assert!(difference < 1e-5, "{extra}: {difference:e}");
    }
}

/// With 24 tokens, all steps have the same batch. The loss after some steps is therefore the first loss of a training
/// run that starts from there.
#[test]
fn a_consolidated_model_continues_with_the_same_loss() {
    for extra in [
        "--ranks 2",
        "--ranks 4 --strategy no-shard",
        "--ranks 2 --compile",
    ] {
        let folder = Folder::new();
        let run = format!("{TRAIN} --vocab 24 {extra}");
        folder.report(&format!("{run} --steps 4 --checkpoint-dir steps"));
        consolidate(&folder, "steps one.safetensors");
        consolidate(&folder, "steps many --max-shard-size 5KB");
        consolidate(&folder, "steps single --max-shard-size 5GB");
        let resumed = format!("{run} --steps 5 --checkpoint-dir steps --resume");
        let want = losses(&folder.report(&resumed));
        assert_eq!(want.len(), 1);
        for from in ["one.safetensors", "many", "single"] {
            let got = folder.report(&format!("{run} --steps 1 --init {from}"));
            assert_eq!(losses(&got), want, "{extra} {from}: the same bits");
        }
        folder.report(&format!(
            "{run} --steps 0 --init many --save-init saved.safetensors"
        ));
        let saved = read_file(&folder, "saved.safetensors");
        assert!(
            saved == read_file(&folder, "one.safetensors"),
            "one table for all"
        );
    }
}

#[test]
fn names_of_burn_are_written_on_demand() {
    let folder = Folder::new();
    folder.report(&format!(
        "{TRAIN} --vocab 24 --steps 1 --checkpoint-dir steps"
    ));
    consolidate(&folder, "steps burn.safetensors --names burn");
    consolidate(&folder, "steps torch.safetensors --names torch");
    let (burn, torch) = (
        read_file(&folder, "burn.safetensors"),
        read_file(&folder, "torch.safetensors"),
    );
    assert_eq!(burn.len(), torch.len());
    assert_eq!(burn["blocks.0.ln1.gamma"], torch["blocks.0.ln1.weight"]);
    assert_eq!(burn["blocks.1.qkv.weight"].0, serde_json::json!([16, 48]));
    assert_eq!(torch["blocks.1.qkv.weight"].0, serde_json::json!([48, 16]));
    let (header, _) = folder.weights("burn.safetensors");
    assert!(!header.contains("\"format\":\"pt\""), "{header}");
    let refused = folder.train(&format!("{TRAIN} --vocab 24 --init burn.safetensors"));
    assert_eq!(refused.code, 2, "{}", refused.stderr);
}

#[test]
fn a_model_without_a_name_table_is_written_unchanged() {
    let folder = Folder::new();
    for (name, model) in [
        ("none", Value::Null),
        // Sizes of a GPT with other tensors, and with more of them than a table should ever have.
        ("other", gpt_sizes(1)),
        ("huge", gpt_sizes(1 << 40)),
    ] {
        save_matrix(&folder.path(name), model);
    }
    let run = folder.run("consolidate none none.safetensors");
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert!(
        run.stderr.contains("names and layout are Burn's"),
        "{}",
        run.stderr
    );
    assert_eq!(
        read_file(&folder, "none.safetensors")["matrix"].0,
        serde_json::json!([2, 3])
    );
    for (arguments, text) in [
        ("none a.safetensors --names torch", "has no table of names"),
        ("other a.safetensors", "no such tensor"),
        ("huge a.safetensors", "1099511627776 layers"),
    ] {
        let run = folder.run(&format!("consolidate {arguments}"));
        assert_eq!(run.code, 2, "{arguments}: {}", run.stderr);
        assert!(
            run.stderr.contains(text) && run.stderr.contains("--names burn"),
            "{arguments}: {}",
            run.stderr
        );
        assert!(!folder.path("a.safetensors").exists());
    }
    consolidate(&folder, "other other.safetensors --names burn");
}

fn gpt_sizes(layers: u64) -> Value {
    serde_json::json!({"layers": layers, "dim": 1, "heads": 1, "vocab": 2, "seq": 3})
}

/// Saves a step with one tensor, as any program may write it.
fn save_matrix(folder: &Path, model: Value) {
    let mesh = Mesh::line("shard", 1).expect("a mesh");
    let layout = Layout::flat(&mesh, "shard").expect("an axis");
    let matrix = TensorSpec::new("matrix", [2, 3], Dtype::F32, TensorKind::Parameter, layout);
    let plan = Arc::new(WritePlan::new(&mesh, vec![matrix]).expect("fits"));
    let mut snapshot = Snapshot::new();
    snapshot.insert("matrix", Region::whole(&[2, 3]), vec![1_u8; 24]);
    let request = SaveRequest {
        model,
        ..SaveRequest::new(plan, TrainingState::default())
    };
    save_step(
        &Checkpoints::new(folder),
        &request,
        &mut snapshot,
        &mut Alone,
    )
    .expect("saves");
}

fn torch_peer(python: &Path, folder: &Folder, arguments: &str) -> String {
    let script = crate_folder().join("tests/cli/torch_peer.py");
    let output = Command::new(python)
        .arg(script)
        .args(arguments.split_whitespace())
        .current_dir(folder.path(""))
        .output()
        .expect("Python starts");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments}: {error}");
    String::from_utf8(output.stdout).expect("text")
}

fn torch_losses(python: &Path, folder: &Folder, weights: &str) -> Vec<f64> {
    let losses = torch_peer(python, folder, &format!("losses {weights} 2 6"));
    serde_json::from_str(&losses).expect("a list of losses")
}

#[test]
fn pytorch_continues_from_a_consolidated_model() {
    let Some(python) = python("torch") else {
        return;
    };
    for extra in ["--ranks 4", "--ranks 2 --compile"] {
        let folder = Folder::new();
        let run = format!("{TRAIN} --vocab 29 {extra}");
        folder.report(&format!("{run} --steps 7 --checkpoint-dir steps"));
        consolidate(&folder, "steps one.safetensors");
        consolidate(&folder, "steps many --max-shard-size 5KB");
        let ours = losses(&folder.report(&format!("{run} --steps 6 --init one.safetensors")));
        for weights in ["one.safetensors", "many"] {
            let theirs = torch_losses(&python, &folder, weights);
            let difference = relative_difference(&theirs, &ours);
            println!("{extra} {weights}: at most {difference:e} apart");
            assert!(difference < 1e-5, "{extra} {weights}: {difference:e}");
        }
    }
}

#[test]
fn training_continues_from_a_pytorch_model() {
    let Some(python) = python("torch") else {
        return;
    };
    let folder = Folder::new();
    torch_peer(&python, &folder, "train torch.safetensors 2 31");
    let theirs = torch_losses(&python, &folder, "torch.safetensors");
    let run = format!("{TRAIN} --vocab 31 --init torch.safetensors --steps 6");
    let difference = relative_difference(&theirs, &losses(&folder.report(&run)));
    println!("at most {difference:e} apart");
    assert!(difference < 1e-5, "{difference:e}");
}
