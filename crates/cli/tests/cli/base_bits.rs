//! `--base-bits`: adapters on frozen weights in 8 or 4 bits, compared with plain Burn on weights that the test rounds.

use burn::module::{Lora, Module, ModuleMapper, Param, ParamGroup};
use burn::tensor::{Device, Tensor, TensorData};
use burn_fsdp_models::{Architecture, ParameterSpec};

use crate::command::{Folder, losses, relative_difference};
use crate::hugging_face::{
    Factors, GPT2, LLAMA, assert_close, folders, loaded, ok, plainly, report, train,
};
use crate::rounding::rounded;

/// A step that changes nothing and reports the loss of the first batch.
const STILL: &str = "--lr 0 --weight-decay 0 --steps 1 --synthetic";

/// A model, flags of its adapters of scale 1.5, their rank, the bits, and the ends of the adapted modules' names.
type Case = (
    &'static str,
    &'static str,
    usize,
    usize,
    &'static [&'static str],
);

const CASES: [Case; 3] = [
    ("llama", "--lora 2 --lora-alpha 3", 2, 4, &["_proj.weight"]),
    (
        "llama",
        "--lora 2 --lora-alpha 3 --lora-targets q_proj,down_proj",
        2,
        8,
        &[".q_proj.weight", ".down_proj.weight"],
    ),
    (
        "gpt2",
        "--lora 4 --lora-alpha 6 --lora-targets attn.c_attn,c_fc",
        4,
        4,
        &[".attn.c_attn.weight", ".c_fc.weight"],
    ),
];

fn is_adapted(spec: &ParameterSpec, ends: &[&str]) -> bool {
    ends.iter().any(|end| spec.name.ends_with(end))
}

/// A mapper that rounds the weights at some paths.
struct Round {
    path: Vec<String>,
    bits: usize,
    paths: Vec<String>,
}

impl ModuleMapper for Round {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !self.paths.contains(&self.path.join(".")) {
            return param;
        }
        let bits = self.bits;
        param.map(|old| {
            let values = old.clone().into_data().try_to_vec::<f32>().expect("floats");
            let data = TensorData::new(rounded(bits, &values), old.shape());
            Tensor::from_data(data, &old.device())
        })
    }
}

/// Returns the losses of plain Burn on rounded weights. Its adapters start with the values in `factors.safetensors`.
fn of_burn<A: Architecture>(folder: &Folder, sizes: A, case: Case) -> Vec<f64> {
    let (name, _, rank, bits, ends) = case;
    let adapted = sizes.parameters().into_iter();
    let adapted = adapted.filter(|spec| is_adapted(spec, ends));
    let paths: Vec<_> = adapted.map(|spec| spec.path).collect();
    let group = ParamGroup::from_paths(paths.clone());
    let lora = Lora::new(rank, 1.5 * rank as f64).set_param_group(group);
    let path = Vec::new();
    let model = loaded(folder, name, sizes)
        .map(&mut Round { path, bits, paths })
        .apply_lora(lora);
    let path = Vec::new();
    let model = model.map(&mut Factors { folder, path });
    plainly(model, 4, 300, &Device::flex().autodiff())
}

#[test]
fn adapters_train_on_rounded_weights_like_burns() {
    let folder = folders();
    for case @ (name, flags, _, bits, _) in CASES {
        let run = format!("--init {name} {flags} --base-bits {bits}");
        report(
            &folder,
            &format!("{run} {STILL} --checkpoint-dir begun --overwrite"),
        );
        ok(&folder, "consolidate begun factors.safetensors --overwrite");
        let want = match name {
            "llama" => of_burn(&folder, LLAMA, case),
            _ => of_burn(&folder, GPT2, case),
        };
        let exact = report(
            &folder,
            &format!("--init {name} {flags} --synthetic --steps 4"),
        );
        let difference = relative_difference(&losses(&exact), &want);
        assert!(difference > 1e-4, "weights are rounded: {difference:e}");
        for extra in [
            "--ranks 1",
            "--ranks 2",
            "--ranks 4",
            "--ranks 2 --strategy no-shard",
            "--ranks 4 --strategy hybrid-shard --replicate-size 2",
            "--ranks 2 --activation-checkpointing",
        ] {
            let run = format!("{run} --synthetic --steps 4 {extra}");
            let got = losses(&report(&folder, &run));
            assert_close(&want, &got, &format!("{name} {flags} {extra}"));
        }
    }
}

/// A run continues on another number of ranks, from a step that contains only the adapters.
#[test]
fn a_run_with_a_rounded_base_continues() {
    let folder = folders();
    let run = "--init llama --lora 2 --base-bits 4 --synthetic --checkpoint-dir";
    let whole = losses(&report(
        &folder,
        &format!("{run} whole --steps 4 --ranks 1"),
    ));
    report(&folder, &format!("{run} parts --steps 2 --ranks 2"));
    let rest = report(
        &folder,
        &format!("{run} parts --steps 4 --ranks 4 --resume"),
    );
    assert_close(&whole[2..], &losses(&rest), "continued");
    for (flags, message) in [
        (
            "--lora 2",
            "adapters of --lora 2 --lora-alpha 4 --base-bits 4",
        ),
        ("--lora 2 --base-bits 8", "--base-bits 8"),
    ] {
        let run =
            format!("--init llama {flags} --synthetic --checkpoint-dir parts --resume --steps 5");
        let refused = train(&folder, &run);
        assert_ne!(refused.code, 0, "{flags}");
        assert!(refused.stderr.contains(message), "{}", refused.stderr);
    }
}

/// The adapters are merged into the weights that they were trained on, as peft merges them into a dequantized base: each
/// matrix is the rounded one plus the scaled product of the factors in the folder for peft.
#[test]
fn adapters_are_merged_into_the_rounded_weights() {
    let folder = folders();
    for (name, flags, rank, bits, ends) in CASES {
        for made in ["steps", "peft", "merged"] {
            std::fs::remove_dir_all(folder.path(made)).ok();
        }
        let run = format!("--init {name} {flags} --base-bits {bits}");
        let steps = "--synthetic --steps 4 --checkpoint-dir steps --ranks 2";
        report(&folder, &format!("{run} {steps}"));
        let write = format!("consolidate steps --format hugging-face --init {name}");
        ok(&folder, &format!("{write} peft"));
        ok(&folder, &format!("{write} merged --merge"));
        let table = match name {
            "llama" => LLAMA.parameters(),
            _ => GPT2.parameters(),
        };
        for spec in table {
            let base = folder.tensor(&format!("{name}/model.safetensors"), &spec.name);
            let merged = folder.tensor("merged/model.safetensors", &spec.name);
            if !is_adapted(&spec, ends) {
                assert_eq!(base, merged, "{}", spec.name);
                continue;
            }
            let matrix = spec.name.strip_suffix(".weight").expect("a weight");
            let factor = |which: &str| {
                let tensor = format!("base_model.model.{matrix}.{which}.weight");
                folder.tensor("peft/adapter_model.safetensors", &tensor)
            };
            let (a, b) = (factor("lora_A"), factor("lora_B"));
            let [rows, columns] = [spec.module_shape()[0], spec.module_shape()[1]];
            // Linear layers of PyTorch are transposed in files, those of GPT-2 are not.
            let place = |row: usize, column: usize| match name {
                "llama" => column * rows + row,
                _ => row * columns + column,
            };
            let places =
                || (0..rows).flat_map(move |row| (0..columns).map(move |column| (row, column)));
            let in_rows: Vec<f32> = places()
                .map(|(row, column)| base[place(row, column)])
                .collect();
            for (base, (row, column)) in rounded(bits, &in_rows).into_iter().zip(places()) {
                let parts = (0..rank).map(|k| a[k * rows + row] * b[column * rank + k]);
                let want = base + 1.5 * parts.sum::<f32>();
                let got = merged[place(row, column)];
                let is_close = (want - got).abs() <= 1e-5 * want.abs().max(1.0);
                assert!(is_close, "{}: {want}, {got}", spec.name);
            }
        }
        let prompt = "--prompt the --tokens 6 --temperature 0 --tokenizer bytes";
        let alone = ok(&folder, &format!("generate --init merged {prompt}"));
        let adapted = ok(
            &folder,
            &format!("generate steps --init {name} {prompt} --ranks 2"),
        );
        assert_eq!(alone.stdout, adapted.stdout, "{name}");
    }
}

#[test]
fn what_base_bits_cannot_be_combined_with_is_rejected() {
    let folder = folders();
    for (arguments, message) in [
        (
            "--init llama --lora 2 --base-bits 4 --compile",
            "--base-bits cannot be used with compiled steps",
        ),
        ("--init llama --base-bits 4", "required arguments"),
        (
            "--init llama --lora 2 --base-bits 5",
            "[possible values: 8, 4]",
        ),
    ] {
        let refused = train(&folder, &format!("{arguments} --synthetic --steps 1"));
        assert_ne!(refused.code, 0, "{arguments}");
        assert!(
            refused.stderr.contains(message),
            "{arguments}: {}",
            refused.stderr
        );
    }
}

/// Sentences of four of these words in turn, each drawn from its part of them.
fn sentences(words: [&str; 4]) -> String {
    let mut state = 1_u32;
    let mut next = |words: &str| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let words: Vec<_> = words.split(' ').collect();
        words[(state >> 16) as usize % words.len()].to_owned()
    };
    let sentences = (0..3_000).map(|_| words.map(&mut next).join(" ") + ".\n");
    sentences.collect()
}

/// A small model, trained on some sentences, learns others almost as well on rounded weights.
#[test]
fn losses_stay_near_those_on_exact_weights() {
    let folder = Folder::new();
    folder.write(
        "first.txt",
        sentences([
            "the a one",
            "cat dog mouse bird",
            "sees hears meets",
            "trees houses rivers",
        ]),
    );
    folder.write(
        "second.txt",
        sentences([
            "every no some",
            "rank unit graph",
            "sends gathers frees",
            "shards weights sums",
        ]),
    );
    let size = "--layers 2 --dim 64 --heads 4 --seq 32 --batch 8 --warmup 0 --ranks 1 --sample 0";
    let run = format!("{size} --data first.txt --steps 150 --lr 3e-3 --checkpoint-dir base");
    folder.report(&run);
    ok(&folder, "consolidate base base.safetensors --names torch");
    let adapt = format!(
        "{size} --data second.txt --init base.safetensors --lora 4 --steps 100 --lr 3e-3 --eval-batches 4"
    );
    let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
    let of = |flags: &str| {
        let report = folder.report(&format!("{adapt} {flags}"));
        let losses = losses(&report);
        let held_out = report["eval_loss"].as_f64().expect("a number");
        (mean(&losses[..20]), mean(&losses[80..]), held_out)
    };
    let exact = of("");
    assert!(exact.1 < exact.0, "{exact:?}");
    for bits in ["8", "4"] {
        let rounded = of(&format!("--base-bits {bits}"));
        for (exact, rounded) in [(exact.1, rounded.1), (exact.2, rounded.2)] {
            let difference = (rounded / exact - 1.0).abs();
            println!("{bits} bits: {rounded}, {exact} on exact weights");
            assert!(difference < 0.01, "{bits} bits: {rounded}, {exact}");
        }
    }
}
