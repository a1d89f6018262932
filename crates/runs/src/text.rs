//! Text and numbers on the page.

use std::fmt;

/// Text from outside, such as a name, in HTML or SVG. Control characters, which HTML does not allow, are replaced.
pub(crate) struct Escaped<'a>(pub(crate) &'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for character in self.0.chars() {
            match character {
                '<' => f.write_str("&lt;")?,
                '>' => f.write_str("&gt;")?,
                '&' => f.write_str("&amp;")?,
                '"' => f.write_str("&quot;")?,
                '\'' => f.write_str("&#39;")?,
                control if control.is_control() => f.write_str("\u{fffd}")?,
                other => write!(f, "{other}")?,
            }
        }
        Ok(())
    }
}

/// A number with about four significant digits.
pub(crate) struct Short(pub(crate) f64);

impl fmt::Display for Short {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.0;
        let size = value.abs();
        if size == 0.0 {
            f.write_str("0")
        } else if !value.is_finite() {
            f.write_str("not finite")
        } else if !(1e-3..1e7).contains(&size) {
            let text = format!("{value:.2e}");
            let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
            write!(f, "{}e{exponent}", without_zeros(digits))
        } else if size >= 1000.0 {
            grouped(f, value.round() as i64)
        } else {
            let digits = 3 - size.log10().floor() as i32;
            let text = format!("{value:.*}", digits.max(0) as usize);
            // Small numbers are settings more often than measurements.
            let is_small = size < 0.01;
            f.write_str(if is_small {
                without_zeros(&text)
            } else {
                &text
            })
        }
    }
}

fn without_zeros(digits: &str) -> &str {
    digits.trim_end_matches('0').trim_end_matches('.')
}

/// A whole number, with a thin space between groups of three digits.
pub(crate) struct Whole(pub(crate) u64);

impl fmt::Display for Whole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        grouped(f, i64::try_from(self.0).unwrap_or(i64::MAX))
    }
}

fn grouped(f: &mut fmt::Formatter<'_>, value: i64) -> fmt::Result {
    let digits = value.unsigned_abs().to_string();
    if value < 0 {
        f.write_str("-")?;
    }
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && digits.len() > 4 && (digits.len() - index).is_multiple_of(3) {
            f.write_str("\u{2009}")?;
        }
        write!(f, "{digit}")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_four_digits() {
        let short = |value: f64| Short(value).to_string();
        assert_eq!(short(3.241_59), "3.242");
        assert_eq!(short(0.012_345), "0.01235");
        assert_eq!(short(0.001), "0.001");
        assert_eq!(short(-812.34), "-812.3");
        assert_eq!(short(1234.4), "1234");
        assert_eq!(short(123_456.0), "123\u{2009}456");
        assert_eq!(short(0.000_02), "2e-5");
        assert_eq!(short(0.0), "0");
        assert_eq!(short(f64::NAN), "not finite");
        assert_eq!(Whole(1_234_567).to_string(), "1\u{2009}234\u{2009}567");
    }

    #[test]
    fn markup_and_control_characters_are_escaped() {
        let escaped = Escaped("<b>&\"'\u{1b}[1m\n").to_string();
        assert_eq!(escaped, "&lt;b&gt;&amp;&quot;&#39;\u{fffd}[1m\u{fffd}");
    }
}
