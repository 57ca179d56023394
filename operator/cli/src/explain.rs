//! `mercury explain`: a code, its meaning and the remedy.

use clap::{
    Arg, Args, Command,
    builder::{PossibleValue, StringValueParser, TypedValueParser},
};
use mercury_abi::code::Code;
use mercury_control::{
    error::Error,
    exit::Exit,
    explain::{Entry, TABLE},
    output::{Render, Tone},
};
use serde::Serialize;
use std::ffi::OsStr;

#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// A code by name or number, such as svm-disabled or 43 [default: list them all]
    #[arg(value_parser = Codes, hide_possible_values = true)]
    pub code: Option<String>,
}

/// The parser of `mercury explain CODE`. Shells complete codes from it; [`explain`] judges the
/// word.
#[derive(Clone, Copy, Debug)]
pub struct Codes;

impl TypedValueParser for Codes {
    type Value = String;

    fn parse_ref(
        &self,
        command: &Command,
        argument: Option<&Arg>,
        value: &OsStr,
    ) -> Result<String, clap::Error> {
        StringValueParser::new().parse_ref(command, argument, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        let value = |entry: &Entry| PossibleValue::new(entry.code.name()).help(entry.meaning);
        Some(Box::new(TABLE.iter().map(value)))
    }
}

/// The output of `mercury explain`.
#[derive(Debug, Serialize)]
pub struct Explanations {
    codes: Vec<Explanation>,
}

#[derive(Debug, Serialize)]
struct Explanation {
    code: &'static str,
    number: u32,
    exit: u8,
    meaning: &'static str,
    why: &'static str,
    remedy: &'static str,
}

/// Returns the explanation of the named or numbered code, or of all codes.
pub fn explain(wanted: Option<&str>) -> Result<Explanations, Error> {
    let codes: Vec<_> = TABLE.iter().filter(|entry| matches(entry.code, wanted)).map(explanation).collect();
    match wanted {
        Some(text) if codes.is_empty() => Err(Error::new(Exit::Usage, format!("there is no code `{text}`"))
            .hint("`mercury explain` lists them all")),
        _ => Ok(Explanations { codes }),
    }
}

fn matches(code: Code, wanted: Option<&str>) -> bool {
    let is = |text: &str| text.eq_ignore_ascii_case(code.name()) || text.parse() == Ok(code as u32);
    wanted.is_none_or(is)
}

fn explanation(entry: &Entry) -> Explanation {
    Explanation {
        code: entry.code.name(),
        number: entry.code as u32,
        exit: Exit::of(entry.code) as u8,
        meaning: entry.meaning,
        why: entry.why,
        remedy: entry.remedy,
    }
}

impl Render for Explanations {
    fn render(&self, to: &mut mercury_control::output::Text) {
        match self.codes.as_slice() {
            [one] => {
                let name = to.tone(Tone::Strong, one.code);
                to.line(format!("{name} ({}): {}.", one.number, one.meaning));
                to.line("");
                to.wrapped("Why:  ", one.why);
                to.wrapped("To do: ", one.remedy);
            }
            all => {
                for one in all {
                    let name = to.tone(Tone::Strong, &format!("{:26}", one.code));
                    to.after(&format!("{:>4}  {name}", one.number), one.meaning);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn found_by_name_and_number() {
        for wanted in ["svm-disabled", "SVM-Disabled", "43"] {
            let found = explain(Some(wanted)).expect(wanted);
            assert_eq!(found.codes.iter().map(|one| one.number).collect::<Vec<_>>(), [43]);
        }
        assert_eq!(explain(None).map(|all| all.codes.len()).ok(), Some(Code::ALL.len()));
        assert_eq!(explain(Some("nonsense")).map_err(|error| error.exit).err(), Some(Exit::Usage));
    }
}
