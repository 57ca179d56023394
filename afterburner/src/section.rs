//! The section that a text is in, as its directives have it.

use std::collections::HashMap;

/// What matters of a section.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Section {
    /// It holds instructions.
    pub is_code: bool,
    /// It holds replacements of alternatives, which the kernel copies over other code.
    pub is_replacement: bool,
}

const TEXT: Section = Section { is_code: true, is_replacement: false };
const DATA: Section = Section { is_code: false, is_replacement: false };

/// Follows `.section` and its kin.
#[derive(Debug)]
pub struct Sections {
    /// The current section and the one before it; beneath, those that were pushed away.
    stack: Vec<(Section, Section)>,
    /// Sections that have been declared with flags: they may be named without later.
    known: HashMap<String, bool>,
}

impl Default for Sections {
    fn default() -> Self {
        Self { stack: vec![(TEXT, TEXT)], known: HashMap::new() }
    }
}

impl Sections {
    /// Where the text is.
    #[must_use]
    pub fn current(&self) -> Section {
        self.stack.last().map_or(TEXT, |(current, _)| *current)
    }

    /// Takes a directive; says what the prelude's macros have to be told, to stand behind it.
    pub fn follow(&mut self, name: &str, rest: &str) -> Option<String> {
        let before = self.current();
        match name {
            ".pushsection" => {
                self.stack.extend(self.stack.last().copied());
                self.enter(rest);
            }
            ".popsection" if self.stack.len() > 1 => drop(self.stack.pop()),
            ".section" => self.enter(rest),
            ".text" => self.set(TEXT),
            ".data" | ".bss" => self.set(DATA),
            ".previous" => {
                let (current, previous) = self.stack.last_mut()?;
                std::mem::swap(current, previous);
            }
            _ => return None,
        }
        let now = self.current().is_replacement;
        (before.is_replacement != now).then(|| format!(" ; .set .Lmercury_alternative, {}", u8::from(now)))
    }

    fn enter(&mut self, rest: &str) {
        let mut parts = rest.split(',').map(|part| part.trim().trim_matches('"'));
        let name = parts.next().unwrap_or_default().to_owned();
        let is_code = match parts.next() {
            Some(flags) if flags.parse::<u32>().is_err() => {
                let is_code = flags.contains('x');
                self.known.insert(name.clone(), is_code);
                is_code
            }
            _ => self.known.get(&name).copied().unwrap_or_else(|| is_text_by_name(&name)),
        };
        self.set(Section { is_code, is_replacement: name.starts_with(".altinstr_replacement") });
    }

    fn set(&mut self, section: Section) {
        if let Some((current, previous)) = self.stack.last_mut() {
            *previous = std::mem::replace(current, section);
        }
    }
}

/// As the assembler has it for sections without flags.
fn is_text_by_name(name: &str) -> bool {
    [".text", ".init", ".fini"].iter().any(|known| {
        name.strip_prefix(known)
            .is_some_and(|rest| rest.is_empty() || (*known == ".text" && rest.starts_with('.')))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(directives: &[(&str, &str)]) -> Section {
        let mut sections = Sections::default();
        for (name, rest) in directives {
            sections.follow(name, rest);
        }
        sections.current()
    }

    #[test]
    fn sections_are_followed() {
        let replacement = Section { is_code: true, is_replacement: true };
        assert_eq!(after(&[]), TEXT);
        assert_eq!(after(&[(".data", "")]), DATA);
        assert_eq!(after(&[(".section", "\".init.text\", \"ax\", @progbits")]), TEXT);
        assert_eq!(after(&[(".section", ".rodata.str1.1,\"ams\",@progbits,1")]), DATA);
        assert_eq!(after(&[(".section", ".x,\"ax\""), (".data", ""), (".section", ".x")]), TEXT);
        assert_eq!(after(&[(".section", ".text.unlikely")]), TEXT);
        assert_eq!(after(&[(".section", ".init.data")]), DATA);
        assert_eq!(after(&[(".data", ""), (".pushsection", ".altinstr_replacement, \"ax\"")]), replacement);
        assert_eq!(after(&[(".data", ""), (".pushsection", ".text"), (".popsection", "")]), DATA);
        assert_eq!(after(&[(".data", ""), (".previous", "")]), TEXT);
        assert_eq!(after(&[(".popsection", "")]), TEXT);
    }

    #[test]
    fn the_prelude_is_told_of_replacements() {
        let mut sections = Sections::default();
        let enter = sections.follow(".pushsection", ".altinstr_replacement,\"ax\"");
        assert!(enter.is_some_and(|told| told.ends_with("mercury_alternative, 1")));
        assert_eq!(sections.follow(".section", ".altinstr_replacement,\"ax\""), None);
        assert!(sections.follow(".popsection", "").is_some_and(|told| told.ends_with(" 0")));
    }
}
