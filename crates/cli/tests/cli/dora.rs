//! Weight-decomposed adapters (DoRA), compared with the formula in plain Burn, from and to folders of peft.

use burn::module::{
    Lora, LoraAdapter, Module, Param, ParamGroup, Reparameterization, Reparameterizer,
};
use burn::tensor::{Device, Tensor};
use burn_fsdp_models::{Architecture, ParameterSpec};
use serde_json::{Value, json};

use crate::command::{Folder, losses, relative_difference};
use crate::hugging_face::{
    Factors, GPT2, LLAMA, assert_close, folders, loaded, ok, peer, peer_loss, plainly, report,
    train,
};
use crate::skipped::python;

/// A step that changes nothing and reports the loss of the first batch.
const STILL: &str = "--lr 0 --weight-decay 0 --steps 1 --synthetic";

/// A model, flags, and the ends of the adapted modules' names. The rank is 3, and the scale 0.5.
const CASES: [(&str, &str, &[&str]); 2] = [
    (
        "llama",
        "--dora --lora 3 --lora-alpha 1.5 --lora-targets q_proj,down_proj",
        &[".q_proj.weight", ".down_proj.weight"],
    ),
    (
        "gpt2",
        "--dora --lora 3 --lora-alpha 1.5 --lora-targets attn.c_attn,c_fc",
        &[".attn.c_attn.weight", ".c_fc.weight"],
    ),
];

#[derive(Module, Debug)]
struct Decomposed {
    a: Param<Tensor<2>>,
    b: Param<Tensor<2>>,
    magnitude: Param<Tensor<1>>,
    scale: f64,
}

impl Reparameterization for Decomposed {
    const NAME: &'static str = LoraAdapter::NAME;

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        let shape = base.shape();
        let base: Tensor<2> = base.reshape([shape[0], shape[1]]);
        let sum = base + self.a.val().matmul(self.b.val()).mul_scalar(self.scale);
        let norms = (sum.clone() * sum.clone()).sum_dim(0).sqrt().detach();
        let magnitude: Tensor<2> = self.magnitude.val().reshape([1, shape[1]]);
        (sum * (magnitude / norms)).reshape(shape)
    }
}

struct Dora(Lora);

impl Reparameterizer for Dora {
    type Reparam = Decomposed;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Decomposed>) {
        let (param, adapter) = self.0.reparameterize(path, param);
        let adapter = adapter.map(|LoraAdapter { a, b, scale }| {
            let base = param.base();
            let magnitude = Tensor::ones([base.shape()[1]], &base.device());
            let magnitude = Param::from_tensor(magnitude);
            Decomposed {
                a,
                b,
                magnitude,
                scale,
            }
        });
        (param, adapter)
    }
}

fn is_adapted(spec: &ParameterSpec, ends: &[&str]) -> bool {
    ends.iter().any(|end| spec.name.ends_with(end))
}

/// Returns the losses of plain Burn, whose adapters start with the values in `factors.safetensors`.
fn of_burn<A: Architecture>(folder: &Folder, sizes: A, name: &str, ends: &[&str]) -> Vec<f64> {
    let adapted = sizes.parameters().into_iter();
    let paths = adapted.filter(|spec| is_adapted(spec, ends));
    let group = ParamGroup::from_paths(paths.map(|spec| spec.path).collect::<Vec<_>>());
    let dora = Dora(Lora::new(3, 1.5).set_param_group(group));
    let path = Vec::new();
    let model = loaded(folder, name, sizes)
        .apply_reparameterization(dora)
        .map(&mut Factors { folder, path });
    plainly(model, 4, 300, &Device::flex().autodiff())
}

#[test]
fn decomposed_adapters_train_like_the_formula() {
    let folder = folders();
    for (name, flags, ends) in CASES {
        let run = format!("--init {name} {flags}");
        let begun = format!("{run} {STILL} --checkpoint-dir begun --overwrite");
        let begun = report(&folder, &begun);
        ok(&folder, "consolidate begun factors.safetensors --overwrite");
        let (table, want) = match name {
            "llama" => (LLAMA.parameters(), of_burn(&folder, LLAMA, name, ends)),
            _ => (GPT2.parameters(), of_burn(&folder, GPT2, name, ends)),
        };
        let adapted = table.iter().filter(|spec| is_adapted(spec, ends));
        let sizes = adapted.map(|spec| {
            let shape = spec.module_shape();
            3 * (shape[0] + shape[1]) + shape[1]
        });
        assert_eq!(begun["trained_params"], sizes.sum::<usize>(), "{flags}");
        // A new adapter does not change the model.
        let base = losses(&report(&folder, &format!("--init {name} {STILL}")));
        assert_close(&base, &want[..1], "the first loss");
        let without = report(
            &folder,
            &format!("{run} --synthetic --steps 4").replace("--dora", ""),
        );
        let difference = relative_difference(&losses(&without), &want);
        assert!(difference > 1e-4, "magnitudes are trained: {difference:e}");
        for extra in [
            "--ranks 1",
            "--ranks 2",
            "--ranks 4",
            "--ranks 1 --compile",
            "--ranks 2 --compile",
            "--ranks 4 --compile --certify",
        ] {
            let got = losses(&report(
                &folder,
                &format!("{run} --synthetic --steps 4 {extra}"),
            ));
            assert_close(&want, &got, &format!("{name} {extra}"));
        }
    }
}

fn config_of(folder: &Folder, name: &str) -> Value {
    let config = folder.read(&format!("{name}/adapter_config.json"));
    serde_json::from_str(&config).expect("JSON")
}

/// Trains adapters into `steps`, and writes them to `peft` and `merged`.
fn written(folder: &Folder, name: &str, flags: &str) {
    for made in ["steps", "peft", "merged"] {
        std::fs::remove_dir_all(folder.path(made)).ok();
    }
    let run = format!("--init {name} {flags} --synthetic --steps 4 --checkpoint-dir steps");
    report(folder, &run);
    let write = format!("consolidate steps --format hugging-face --init {name}");
    ok(folder, &format!("{write} peft"));
    ok(folder, &format!("{write} merged --merge"));
}

#[test]
fn decomposed_adapters_are_written_read_and_merged_as_in_peft() {
    let folder = folders();
    let python = python("torch, transformers, peft");
    for (name, flags, _) in CASES {
        written(&folder, name, flags);
        let config = config_of(&folder, "peft");
        assert_eq!(config["use_dora"], true);
        let (header, _) = folder.weights("peft/adapter_model.safetensors");
        let header: Value = serde_json::from_str(&header).expect("JSON");
        let magnitude = match name {
            "llama" => "base_model.model.model.layers.1.mlp.down_proj.lora_magnitude_vector",
            _ => "base_model.model.transformer.h.1.mlp.c_fc.lora_magnitude_vector",
        };
        assert_eq!(header[magnitude]["shape"].as_array().map(Vec::len), Some(1));
        let merged = losses(&report(&folder, &format!("--init merged {STILL}")));
        let base = losses(&report(&folder, &format!("--init {name} {STILL}")));
        assert!((merged[0] - base[0]).abs() > 1e-3, "adapters do something");
        for extra in ["--ranks 1", "--ranks 4", "--ranks 2 --compile"] {
            let run = format!("--init {name} --adapter peft {STILL} {extra}");
            let again = losses(&report(&folder, &run));
            assert_close(&merged, &again, &format!("{flags} {extra}"));
        }
        ok(
            &folder,
            &format!("consolidate peft both --init {name} --merge"),
        );
        let file = |name: &str| folder.weights(&format!("{name}/model.safetensors"));
        assert_eq!(file("both"), file("merged"));
        std::fs::remove_dir_all(folder.path("both")).expect("a folder");
        if let Some(python) = &python {
            let theirs = peer_loss(python, &folder, &format!("{name} peft"));
            assert_close(&theirs, &merged, &format!("{flags} in peft"));
            // Weight by weight, as peft merges them.
            let difference = peer(python, &folder, &format!("merge {name} peft merged"));
            let difference: f64 = difference.parse().expect("a number");
            assert!(difference < 1e-6, "{difference:e}");
        }
    }
    let refused = |flags: &str| {
        let run = format!("--init gpt2 {flags} --synthetic --steps 5");
        let run = train(&folder, &format!("{run} --checkpoint-dir steps --resume"));
        assert_eq!(run.code, 2, "{flags}: {}", run.stderr);
        run.stderr
    };
    let of_lora = CASES[1].1.replace("--dora", "");
    let problem =
        "adapters of --lora 3 --lora-alpha 1.5 --dora, but this run trains adapters of --lora 3";
    assert!(refused(&of_lora).contains(problem), "{}", refused(&of_lora));
    assert!(refused("--dora").contains("--lora <RANK>"));
}

/// The magnitudes come from the folder, and are trained on in both engines.
#[test]
fn training_continues_from_a_folder_of_decomposed_adapters() {
    let folder = folders();
    let (name, flags, ends) = CASES[0];
    written(&folder, name, flags);
    ok(&folder, "consolidate steps factors.safetensors");
    let want = of_burn(&folder, LLAMA, name, ends);
    let run = "--init llama --adapter peft --synthetic";
    for (index, extra) in ["--ranks 1", "--ranks 4", "--ranks 4 --compile"]
        .into_iter()
        .enumerate()
    {
        let again = format!("--checkpoint-dir again-{index} {extra}");
        let mut got = losses(&report(&folder, &format!("{run} --steps 2 {again}")));
        let rest = report(&folder, &format!("{run} --steps 4 {again} --resume"));
        got.extend(losses(&rest));
        assert_close(&want, &got, extra);
    }
    let text = folder.run("generate steps --init llama --prompt ab --tokens 4 --ranks 2");
    assert_eq!(text.code, 0, "{}", text.stderr);
    // Without the magnitudes, and with the setting switched off.
    let mut config = config_of(&folder, "peft");
    config["use_dora"] = json!(false);
    folder.write("peft/adapter_config.json", config.to_string());
    let other = train(&folder, &format!("--init llama --adapter peft {STILL}"));
    assert_eq!(other.code, 2, "{}", other.stderr);
    let problem = "lora_magnitude_vector is no factor of a matrix";
    assert!(other.stderr.contains(problem), "{}", other.stderr);
    written(&folder, name, &flags.replace("--dora", ""));
    let mut config = config_of(&folder, "peft");
    config["use_dora"] = json!(true);
    folder.write("peft/adapter_config.json", config.to_string());
    let other = train(&folder, &format!("--init llama --adapter peft {STILL}"));
    assert_eq!(other.code, 2, "{}", other.stderr);
    let problem = "it lacks tensor base_model.model.model.layers.0.";
    assert!(other.stderr.contains(problem), "{}", other.stderr);
}

#[test]
fn decomposed_adapters_that_peft_has_written_are_read() {
    let Some(python) = python("torch, transformers, peft") else {
        return;
    };
    let folder = folders();
    for (index, (name, settings)) in [
        ("llama", json!({"r": 3, "target_modules": ["q_proj", "up_proj"], "use_dora": true})),
        (
            "gpt2",
            json!({
                "r": 2, "target_modules": ["c_proj", "attn.c_attn"], "fan_in_fan_out": true, "use_dora": true,
                "use_rslora": true,
            }),
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let out = format!("peft-{index}");
        peer(&python, &folder, &format!("adapt {name} {out} {settings}"));
        let theirs = peer_loss(&python, &folder, &format!("{name} {out}"));
        for extra in ["--ranks 2", "--ranks 1 --compile"] {
            let run = format!("--init {name} --adapter {out} {STILL} {extra}");
            let ours = losses(&report(&folder, &run));
            assert_close(&theirs, &ours, &format!("{settings} {extra}"));
        }
        let merged = format!("merged-{index}");
        ok(&folder, &format!("consolidate {out} {merged} --init {name} --merge"));
        let ours = losses(&report(&folder, &format!("--init {merged} {STILL}")));
        assert_close(&theirs, &ours, &format!("{settings}, merged"));
    }
}
