//! The printed form of answers.

use serde_json::json;

use super::prompts::GivenPrompt;
use crate::args::PromptArgs;
use crate::console;
use crate::error::{Failure, InputError};
use crate::text::{Generated, Prompt, Sample, printable};

const MIB: f64 = (1 << 20) as f64;

/// Prints the answers, and the speed if there are several or if they are JSON.
pub(super) fn print(
    args: &PromptArgs,
    given: &[GivenPrompt],
    prompts: &[Prompt],
    sample: &Sample<'_>,
    generated: &Generated,
) -> Result<(), Failure> {
    let (mut out, mut num_tokens) = (Vec::new(), 0);
    let all = given.iter().zip(prompts).zip(&generated.answers);
    for (index, ((given, prompt), answer)) in all.enumerate() {
        let prompt_len = prompt.tokens.len();
        let new = answer.tokens.len() - prompt_len;
        num_tokens += new;
        let text = sample.text(answer, prompt_len).map_err(InputError::from)?;
        let own = &text.whole[text.start..];
        if args.json {
            let line = json!({
                "index": index,
                "prompt": given.text,
                "text": String::from_utf8_lossy(own),
                "finish": answer.finish,
                "prompt_tokens": prompt_len,
                "tokens": new,
                "seed": prompt.seed,
            });
            out.push(line.to_string());
            continue;
        }
        let text = printable(if args.chat { own } else { &text.whole });
        out.push(match (prompts.len(), args.chat) {
            (1, _) => text,
            (all, false) => format!("[{}/{all}]\n{text}\n", index + 1),
            (all, true) => {
                let message = printable(given.text.as_bytes());
                format!("[{}/{all}] {message}\n{text}\n", index + 1)
            }
        });
    }
    console::answer(out.join("\n"))?;
    if prompts.len() > 1 || args.json {
        console::tell(summary(prompts.len(), num_tokens, generated));
    }
    Ok(())
}

/// Describes the speed of a generation, and its memory for keys and values.
fn summary(num_prompts: usize, num_tokens: usize, generated: &Generated) -> String {
    let (seconds, mib) = (generated.seconds, generated.cache_bytes as f64 / MIB);
    let speed = num_tokens as f64 / seconds.max(f64::MIN_POSITIVE);
    let plural = if num_prompts == 1 { "" } else { "s" };
    format!(
        "{num_prompts} prompt{plural}: {num_tokens} tokens in {seconds:.2} s, {speed:.1} tokens/s; keys and values: at most \
         {mib:.1} MiB on a rank"
    )
}
