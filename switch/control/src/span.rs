//! Durations on the command line: 300ms, 2s, 10m, 6h.

use std::{str::FromStr, time::Duration};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Span(pub Duration);

impl FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = text.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = text.split_at(digits);
        let number: u64 = number.parse().map_err(|_| "such as 300ms, 2s, 10m or 6h".to_owned())?;
        let millis = match unit {
            "ms" => 1,
            "s" => 1000,
            "m" => 60_000,
            "h" => 3_600_000,
            _ => return Err("such as 300ms, 2s, 10m or 6h".into()),
        };
        number
            .checked_mul(millis)
            .filter(|millis| *millis <= 1000 * 3_600_000)
            .map(|millis| Self(Duration::from_millis(millis)))
            .ok_or_else(|| "at most 1000h".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans() {
        let span = |text: &str| text.parse::<Span>().map(|span| span.0.as_millis());
        assert_eq!(span("300ms"), Ok(300));
        assert_eq!(span("2s"), Ok(2000));
        assert_eq!(span("6h"), Ok(21_600_000));
        for wrong in ["", "s", "3", "3d", "-1s", "1001h", "99999999999999999999s"] {
            assert!(span(wrong).is_err(), "{wrong}");
        }
    }
}
