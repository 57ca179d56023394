//! The section that a text is in, as its directives have it.

use std::collections::HashMap;

/// What matters of a section.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Section {
    /// It holds instructions.
    pub is_code: bool,
    /// It holds replacements of alternatives, which the kernel copies over other code.
    pub is_replacement: bool,
    /// Which one it is of the text's.
    pub number: usize,
}

/// Where a text begins.
const TEXT: Section = Section { is_code: true, is_replacement: false, number: 0 };

/// Follows `.section` and its kin.
#[derive(Debug)]
pub struct Sections {
    /// The current section and the one before it; beneath, those that were pushed away.
    stack: Vec<(Section, Section)>,
    /// Sections that have been declared with flags: they may be named without later.
    known: HashMap<String, bool>,
    /// By number.
    names: Vec<String>,
}

impl Default for Sections {
    fn default() -> Self {
        Self { stack: vec![(TEXT, TEXT)], known: HashMap::new(), names: vec![".text".to_owned()] }
    }
}

impl Sections {
    /// Where the text is.
    #[must_use]
    pub fn current(&self) -> Section {
        self.stack.last().map_or(TEXT, |(current, _)| *current)
    }

    /// The name of a section.
    #[must_use]
    pub fn name(&self, number: usize) -> &str {
        &self.names[number]
    }

    /// Takes a directive; says whether it was one of these.
    pub fn follow(&mut self, name: &str, rest: &str) -> bool {
        match name {
            ".pushsection" => {
                self.stack.extend(self.stack.last().copied());
                self.enter(rest);
            }
            ".popsection" if self.stack.len() > 1 => drop(self.stack.pop()),
            ".section" => self.enter(rest),
            ".text" | ".data" | ".bss" => self.enter(name),
            ".previous" => {
                if let Some((current, previous)) = self.stack.last_mut() {
                    std::mem::swap(current, previous);
                }
            }
            _ => return false,
        }
        true
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
        let is_replacement = name.starts_with(".altinstr_replacement");
        let number = self.names.iter().position(|known| *known == name).unwrap_or(self.names.len());
        if number == self.names.len() {
            self.names.push(name);
        }
        let section = Section { is_code, is_replacement, number };
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

    const CODE: (bool, bool) = (true, false);
    const DATA: (bool, bool) = (false, false);

    fn after(directives: &[(&str, &str)]) -> (bool, bool) {
        let mut sections = Sections::default();
        for (name, rest) in directives {
            sections.follow(name, rest);
        }
        (sections.current().is_code, sections.current().is_replacement)
    }

    #[test]
    fn sections_are_followed() {
        let replacement = (true, true);
        assert_eq!(after(&[]), CODE);
        assert_eq!(after(&[(".data", "")]), DATA);
        assert_eq!(after(&[(".section", "\".init.text\", \"ax\", @progbits")]), CODE);
        assert_eq!(after(&[(".section", ".rodata.str1.1,\"ams\",@progbits,1")]), DATA);
        assert_eq!(after(&[(".section", ".x,\"ax\""), (".data", ""), (".section", ".x")]), CODE);
        assert_eq!(after(&[(".section", ".text.unlikely")]), CODE);
        assert_eq!(after(&[(".section", ".init.data")]), DATA);
        assert_eq!(after(&[(".data", ""), (".pushsection", ".altinstr_replacement, \"ax\"")]), replacement);
        assert_eq!(after(&[(".data", ""), (".pushsection", ".text"), (".popsection", "")]), DATA);
        assert_eq!(after(&[(".data", ""), (".previous", "")]), CODE);
        assert_eq!(after(&[(".popsection", "")]), CODE);
    }

    #[test]
    fn sections_have_numbers_and_names() {
        let mut sections = Sections::default();
        assert!(sections.follow(".section", ".head.text,\"ax\""));
        let head = sections.current().number;
        assert_eq!((sections.name(head), sections.name(0)), (".head.text", ".text"));
        assert!(sections.follow(".previous", "") && sections.current().number == 0);
        assert!(sections.follow(".section", ".head.text") && sections.current().number == head);
        assert!(!sections.follow(".align", "8"));
    }
}
