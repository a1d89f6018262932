//! The parameters of each model, with their names here and in files for other programs.
//!
//! Only this table contains both names. All code that reads or writes such files uses it.

use crate::{Gpt, Gpt2, Gpt2Config, GptConfig};

/// A parameter, with its form in the module and in files for other programs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParameterSpec {
    /// Path in the Burn module, such as `blocks.0.ln1.gamma`.
    pub path: String,
    /// Name in files, such as `blocks.0.ln1.weight`.
    pub name: String,
    /// Shape in files. Weights of linear layers are `[out, in]`, except in GPT-2.
    pub shape: Vec<usize>,
    /// True if the module has the two dims in the opposite order: weights of Burn's linear layers are `[in, out]`.
    pub is_transposed: bool,
}

impl ParameterSpec {
    /// Returns the shape in the Burn module.
    #[must_use]
    pub fn module_shape(&self) -> Vec<usize> {
        let mut shape = self.shape.clone();
        if self.is_transposed {
            shape.reverse();
        }
        shape
    }
}

impl GptConfig {
    /// Returns all parameters in the order in which the forward pass uses them.
    ///
    /// Names and shapes are those of a PyTorch model whose modules are named like the fields of [`Gpt`], such as
    /// `blocks.0.ln1.weight`.
    #[must_use]
    pub fn parameters(&self) -> Vec<ParameterSpec> {
        let (dim, wide) = (self.dim, 4 * self.dim);
        let mut table = vec![
            embedding("wte", "wte", self.vocab, dim),
            embedding("wpe", "wpe", self.seq, dim),
        ];
        for layer in 0..self.layers {
            let block = format!("blocks.{layer}.");
            let norm = |module: &str| {
                let module = format!("{block}{module}");
                layer_norm(&module, &module, dim)
            };
            let linear = |module: &str, into: usize, from: usize| {
                let module = format!("{block}{module}");
                [linear(&module, &module, into, from), bias(&module, into)]
            };
            table.extend(norm("ln1"));
            table.extend(linear("qkv", 3 * dim, dim));
            table.extend(linear("proj", dim, dim));
            table.extend(norm("ln2"));
            table.extend(linear("fc", wide, dim));
            table.extend(linear("out", dim, wide));
        }
        table.extend(layer_norm("lnf", "lnf", dim));
        table.push(linear("head", "head", self.vocab, dim));
        table
    }
}

impl Gpt2Config {
    /// Returns all parameters in the order in which the forward pass uses them.
    ///
    /// Names and shapes match Hugging Face's `GPT2LMHeadModel`, whose matrices are `[in, out]` like Burn's. In both,
    /// the head is not a separate parameter.
    #[must_use]
    pub fn parameters(&self) -> Vec<ParameterSpec> {
        let (dim, hidden) = (self.dim, self.hidden);
        let top = |module: &str| format!("transformer.{module}");
        let norm = |path: &str| layer_norm(path, &top(path), dim);
        let mut table = vec![
            embedding("wte", &top("wte"), self.vocab, dim),
            embedding("wpe", &top("wpe"), self.seq, dim),
        ];
        for layer in 0..self.layers {
            let path = |module: &str| format!("h.{layer}.{module}");
            let matrix = |module: &str, theirs: &str, shape: [usize; 2]| {
                let (path, name) = (path(module), top(&path(theirs)));
                let of = |field: &str| (format!("{path}.{field}"), format!("{name}.{field}"));
                let ((weight, weight_name), (bias, bias_name)) = (of("weight"), of("bias"));
                [
                    spec(weight, weight_name, &shape, false),
                    spec(bias, bias_name, &shape[1..], false),
                ]
            };
            table.extend(norm(&path("ln_1")));
            table.extend(matrix("c_attn", "attn.c_attn", [dim, 3 * dim]));
            table.extend(matrix("c_proj", "attn.c_proj", [dim, dim]));
            table.extend(norm(&path("ln_2")));
            table.extend(matrix("c_fc", "mlp.c_fc", [dim, hidden]));
            table.extend(matrix("mlp_proj", "mlp.c_proj", [hidden, dim]));
        }
        table.extend(norm("ln_f"));
        table
    }
}

/// A module that determines the table of its parameters.
pub(crate) trait HasTable {
    /// Returns the table of the module's parameters.
    fn table(&self) -> Vec<ParameterSpec>;
}

impl HasTable for Gpt {
    fn table(&self) -> Vec<ParameterSpec> {
        self.config().parameters()
    }
}

impl HasTable for Gpt2 {
    fn table(&self) -> Vec<ParameterSpec> {
        self.config().parameters()
    }
}

fn spec(path: String, name: String, shape: &[usize], is_transposed: bool) -> ParameterSpec {
    ParameterSpec {
        path,
        name,
        shape: shape.to_vec(),
        is_transposed,
    }
}

/// Returns an embedding with one vector for each of `number` tokens or positions. It is never transposed.
pub(crate) fn embedding(path: &str, name: &str, number: usize, dim: usize) -> ParameterSpec {
    let shape = [number, dim];
    spec(
        format!("{path}.weight"),
        format!("{name}.weight"),
        &shape,
        false,
    )
}

/// Returns the matrix of a linear layer.
pub(crate) fn linear(path: &str, name: &str, into: usize, from: usize) -> ParameterSpec {
    let shape = [into, from];
    spec(
        format!("{path}.weight"),
        format!("{name}.weight"),
        &shape,
        true,
    )
}

/// Returns the bias of a linear layer.
fn bias(path: &str, into: usize) -> ParameterSpec {
    bias_as(path, path, into)
}

/// Returns the bias of a linear layer with another name in files.
pub(crate) fn bias_as(path: &str, name: &str, into: usize) -> ParameterSpec {
    spec(
        format!("{path}.bias"),
        format!("{name}.bias"),
        &[into],
        false,
    )
}

/// Returns the scale and offset of a layer norm.
pub(crate) fn layer_norm(path: &str, name: &str, dim: usize) -> [ParameterSpec; 2] {
    [("gamma", "weight"), ("beta", "bias")].map(|(ours, theirs)| {
        spec(
            format!("{path}.{ours}"),
            format!("{name}.{theirs}"),
            &[dim],
            false,
        )
    })
}

/// Returns the scale of a root-mean-square norm.
pub(crate) fn rms_norm(path: &str, name: &str, dim: usize) -> ParameterSpec {
    spec(
        format!("{path}.gamma"),
        format!("{name}.weight"),
        &[dim],
        false,
    )
}
