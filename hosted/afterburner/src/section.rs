//! The current section of a text, by its directives.

use std::collections::HashMap;

/// The relevant properties of a section.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Section {
    /// True if the section holds instructions.
    pub is_code: bool,
    /// True if the section holds replacements of alternatives, which the kernel copies over other
    /// code.
    pub is_replacement: bool,
    /// Number of the section in the text.
    pub number: usize,
}

/// The section in which a text begins.
const TEXT: Section = Section { is_code: true, is_replacement: false, number: 0 };

/// The sections of a text, as `.section` and similar directives switch between them.
#[derive(Debug)]
pub struct Sections {
    /// The current section and the one before it; beneath, the pushed ones.
    stack: Vec<(Section, Section)>,
    /// Sections that were declared with flags. A later directive may name them without flags.
    known: HashMap<String, bool>,
    /// Names of the sections, by number.
    names: Vec<String>,
}

impl Default for Sections {
    fn default() -> Self {
        Self { stack: vec![(TEXT, TEXT)], known: HashMap::new(), names: vec![".text".to_owned()] }
    }
}

impl Sections {
    /// Returns the current section.
    #[must_use]
    pub fn current(&self) -> Section {
        self.stack.last().map_or(TEXT, |(current, _)| *current)
    }

    /// Returns the name of a section.
    #[must_use]
    pub fn name(&self, number: usize) -> &str {
        &self.names[number]
    }

    /// Follows a directive. Returns true if it concerns sections.
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

/// Returns true for a name that the assembler takes for code if there are no flags.
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
