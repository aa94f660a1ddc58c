//! The small expressions of the mapping files: `block_count - nextn_predict_layers ?? 0`.
//!
//! What a name stands for is the caller's to say: a metadata key, a key of config.json, a symbol. A name that the
//! model lacks is *absent*, and an expression with an absent part is absent, unless `??` gives another value.
//!
//! ```text
//! or      = and ("or" and)*             compare = default (("==" | "!=" | "<" | "<=" | ">" | ">=") default)?
//! and     = compare ("and" compare)*    default = sum ("??" sum)*
//! sum     = product (("+" | "-") product)*
//! product = unary (("*" | "/") unary)*  unary   = "not" unary | atom
//! atom    = number | 'text' | name | tensor('name') | if(or, or, or) | nonzero(or) | at(or, or) | layers('name', or, or)
//!         | trimmed('name') | "true" | "false" | "null" | "omit" | "(" or ")"
//! ```
//!
//! `layers` is a list with a value for each layer of the trunk: the first where the array (or the one value for all)
//! holds there, else the second; of a tensor's name with `{L}`, where the layer has it. `trimmed` is an array without the zeros at its end.

use crate::error::{Error, Result};
use serde_json::Value;

/// What an expression comes to.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Outcome {
    /// A value of the output.
    Is(Value),
    /// Something it needs is not in the model.
    Absent,
    /// `omit`: the key is to be left out.
    Omit,
}

/// Where names get their values.
pub(crate) trait Names {
    /// The value of `name`; `None` when the model has none.
    fn value(&self, name: &str) -> Result<Option<Value>>;
    /// The values of an array; `layers`: cut to the layers of the trunk, or one value for each of them. `None` when the
    /// model has none.
    fn list(&self, name: &str, layers: bool) -> Result<Option<Vec<Value>>> {
        // A tensor's name is no key.
        if layers && name.contains("{L}") {
            return Ok(None);
        }
        self.value(name).map(|value| value.map(|value| vec![value]))
    }
    /// Whether the model has a tensor of this name; `{L}` in it stands for any layer.
    fn has_tensor(&self, name: &str) -> bool;
}

/// Evaluates `text`.
pub(crate) fn evaluate(text: &str, names: &dyn Names) -> Result<Outcome> {
    let mut parser = Parser { text, rest: text, names, depth: 0 };
    let outcome = parser.or()?;
    parser.space();
    if parser.rest.is_empty() { Ok(outcome) } else { Err(parser.wrong("an operator or the end")) }
}

/// Whether a condition holds: absent, `false`, `null` and 0 do not.
pub(crate) fn holds(outcome: &Outcome) -> bool {
    match outcome {
        Outcome::Is(Value::Null) | Outcome::Absent | Outcome::Omit => false,
        Outcome::Is(Value::Bool(b)) => *b,
        Outcome::Is(Value::Number(n)) => n.as_f64() != Some(0.0),
        Outcome::Is(_) => true,
    }
}

/// Parentheses past which an expression is taken for damaged.
const MAX_DEPTH: usize = 32;

struct Parser<'a> {
    text: &'a str,
    rest: &'a str,
    names: &'a dyn Names,
    depth: usize,
}

impl Parser<'_> {
    fn wrong(&self, expected: &str) -> Error {
        let at = self.text.len() - self.rest.len();
        Error::mapping(self.text, format!("expected {expected} at byte {at}"))
    }

    fn space(&mut self) {
        self.rest = self.rest.trim_start();
    }

    /// Takes `symbol` when it comes next.
    fn take(&mut self, symbol: &str) -> bool {
        self.space();
        match self.rest.strip_prefix(symbol) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn expect(&mut self, symbol: &str) -> Result<()> {
        if self.take(symbol) { Ok(()) } else { Err(self.wrong(symbol)) }
    }

    /// Takes the word `word` when it comes next.
    fn take_word(&mut self, word: &str) -> bool {
        self.space();
        match self.rest.strip_prefix(word) {
            Some(rest) if !rest.starts_with(is_name) => {
                self.rest = rest;
                true
            }
            _ => false,
        }
    }

    fn or(&mut self) -> Result<Outcome> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(self.wrong("fewer parentheses"));
        }
        let mut left = self.and()?;
        while self.take_word("or") {
            let right = self.and()?;
            left = Outcome::Is(Value::Bool(holds(&left) || holds(&right)));
        }
        self.depth -= 1;
        Ok(left)
    }

    fn and(&mut self) -> Result<Outcome> {
        let mut left = self.compare()?;
        while self.take_word("and") {
            let right = self.compare()?;
            left = Outcome::Is(Value::Bool(holds(&left) && holds(&right)));
        }
        Ok(left)
    }

    fn compare(&mut self) -> Result<Outcome> {
        let left = self.default()?;
        for symbol in ["==", "!=", "<=", ">=", "<", ">"] {
            if self.take(symbol) {
                let right = self.default()?;
                return Ok(compared(symbol, &left, &right));
            }
        }
        Ok(left)
    }

    fn default(&mut self) -> Result<Outcome> {
        let mut left = self.sum()?;
        while self.take("??") {
            let right = self.sum()?;
            if left == Outcome::Absent {
                left = right;
            }
        }
        Ok(left)
    }

    fn sum(&mut self) -> Result<Outcome> {
        let mut left = self.product()?;
        loop {
            if self.take("+") {
                left = self.arithmetic(left, Self::product, i64::checked_add, |a, b| a + b)?;
            } else if self.take("-") {
                left = self.arithmetic(left, Self::product, i64::checked_sub, |a, b| a - b)?;
            } else {
                return Ok(left);
            }
        }
    }

    fn product(&mut self) -> Result<Outcome> {
        let mut left = self.unary()?;
        loop {
            if self.take("*") {
                left = self.arithmetic(left, Self::unary, i64::checked_mul, |a, b| a * b)?;
            } else if self.take("/") {
                // Whole only when it divides; otherwise a float.
                let exact = |a: i64, b: i64| a.checked_rem(b).filter(|r| *r == 0).map(|_| a / b);
                left = self.arithmetic(left, Self::unary, exact, |a, b| a / b)?;
            } else {
                return Ok(left);
            }
        }
    }

    fn arithmetic(
        &mut self,
        left: Outcome,
        operand: impl Fn(&mut Self) -> Result<Outcome>,
        whole: impl Fn(i64, i64) -> Option<i64>,
        float: impl Fn(f64, f64) -> f64,
    ) -> Result<Outcome> {
        let right = operand(self)?;
        let (Outcome::Is(a), Outcome::Is(b)) = (&left, &right) else { return Ok(Outcome::Absent) };
        if let (Some(a), Some(b)) = (a.as_i64(), b.as_i64())
            && let Some(n) = whole(a, b)
        {
            return Ok(Outcome::Is(n.into()));
        }
        let (Some(x), Some(y)) = (a.as_f64(), b.as_f64()) else {
            return Err(Error::mapping(
                self.text,
                format!("arithmetic on {a} and {b}: expected two numbers"),
            ));
        };
        // Twelve digits: 0.0707 * 10 is meant to be 0.707, not 0.7070000000000001.
        let value = float(x, y);
        Ok(Outcome::Is(number(format!("{value:.11e}").parse().unwrap_or(value))))
    }

    fn unary(&mut self) -> Result<Outcome> {
        if self.take_word("not") {
            self.depth += 1;
            if self.depth > MAX_DEPTH {
                return Err(self.wrong("fewer negations"));
            }
            let value = self.unary()?;
            self.depth -= 1;
            return Ok(Outcome::Is(Value::Bool(!holds(&value))));
        }
        self.atom()
    }

    fn atom(&mut self) -> Result<Outcome> {
        if self.take("(") {
            let inner = self.or()?;
            self.expect(")")?;
            return Ok(inner);
        }
        if self.take("'") {
            return Ok(Outcome::Is(self.quoted()?.into()));
        }
        if self.rest.starts_with(|c: char| c.is_ascii_digit()) {
            let end = self.rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(self.rest.len());
            let (digits, rest) = self.rest.split_at(end);
            let value = match digits.parse::<i64>() {
                Ok(n) => n.into(),
                Err(_) => number(digits.parse::<f64>().map_err(|_| self.wrong("a number"))?),
            };
            self.rest = rest;
            return Ok(Outcome::Is(value));
        }
        let end = self.rest.find(|c: char| !is_name(c)).unwrap_or(self.rest.len());
        if end == 0 {
            return Err(self.wrong("a value"));
        }
        let (name, rest) = self.rest.split_at(end);
        self.rest = rest;
        Ok(match name {
            "true" => Outcome::Is(Value::Bool(true)),
            "false" => Outcome::Is(Value::Bool(false)),
            "null" => Outcome::Is(Value::Null),
            "omit" => Outcome::Omit,
            "tensor" if self.take("(") => {
                if !self.take("'") {
                    return Err(self.wrong("a tensor name in quotes"));
                }
                let name = self.quoted()?;
                self.expect(")")?;
                Outcome::Is(Value::Bool(self.names.has_tensor(&name)))
            }
            "if" if self.take("(") => {
                let condition = self.or()?;
                self.expect(",")?;
                let then = self.or()?;
                self.expect(",")?;
                let otherwise = self.or()?;
                self.expect(")")?;
                if holds(&condition) { then } else { otherwise }
            }
            "layers" if self.take("(") => {
                if !self.take("'") {
                    return Err(self.wrong("a key in quotes"));
                }
                let name = self.quoted()?;
                self.expect(",")?;
                let then = self.or()?;
                self.expect(",")?;
                let otherwise = self.or()?;
                self.expect(")")?;
                let (Outcome::Is(then), Outcome::Is(otherwise)) = (then, otherwise) else {
                    return Ok(Outcome::Absent);
                };
                let of = |value| if holds(&Outcome::Is(value)) { then.clone() } else { otherwise.clone() };
                let list = self.names.list(&name, true)?;
                list.map_or(Outcome::Absent, |values| Outcome::Is(values.into_iter().map(of).collect()))
            }
            "trimmed" if self.take("(") => {
                if !self.take("'") {
                    return Err(self.wrong("a key in quotes"));
                }
                let name = self.quoted()?;
                self.expect(")")?;
                let Some(mut values) = self.names.list(&name, false)? else { return Ok(Outcome::Absent) };
                while values.last().is_some_and(|v| v.as_f64() == Some(0.0)) {
                    values.pop();
                }
                Outcome::Is(values.into())
            }
            // llama.cpp takes many keys with the value 0 for absent ones.
            "nonzero" if self.take("(") => {
                let value = self.or()?;
                self.expect(")")?;
                let zero = matches!(&value, Outcome::Is(v) if v.as_f64() == Some(0.0));
                if zero { Outcome::Absent } else { value }
            }
            // An element of a list, counted from 0.
            "at" if self.take("(") => {
                let list = self.or()?;
                self.expect(",")?;
                let place = self.or()?;
                self.expect(")")?;
                let (Outcome::Is(list), Outcome::Is(place)) = (&list, &place) else {
                    return Ok(Outcome::Absent);
                };
                let place = place.as_u64().and_then(|n| usize::try_from(n).ok());
                place.and_then(|n| list.get(n)).map_or(Outcome::Absent, |value| Outcome::Is(value.clone()))
            }
            name => self.names.value(name)?.map_or(Outcome::Absent, Outcome::Is),
        })
    }

    /// The text up to the closing quote.
    fn quoted(&mut self) -> Result<String> {
        let Some((text, rest)) = self.rest.split_once('\'') else {
            return Err(self.wrong("a closing quote"));
        };
        self.rest = rest;
        Ok(text.to_owned())
    }
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_' || c == '.'
}

fn compared(symbol: &str, left: &Outcome, right: &Outcome) -> Outcome {
    let (Outcome::Is(a), Outcome::Is(b)) = (left, right) else { return Outcome::Is(Value::Bool(false)) };
    let order = match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => a.partial_cmp(&b),
        _ => (a == b).then_some(std::cmp::Ordering::Equal),
    };
    use std::cmp::Ordering::{Equal, Greater, Less};
    Outcome::Is(Value::Bool(match symbol {
        "==" => order == Some(Equal),
        "!=" => order != Some(Equal),
        "<" => order == Some(Less),
        ">" => order == Some(Greater),
        "<=" => matches!(order, Some(Less | Equal)),
        _ => matches!(order, Some(Greater | Equal)),
    }))
}

/// A float as JSON; one that is no number becomes `null`.
pub(crate) fn number(value: f64) -> Value {
    serde_json::Number::from_f64(value).map_or(Value::Null, Value::Number)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Fixed;
    impl Names for Fixed {
        fn value(&self, name: &str) -> Result<Option<Value>> {
            Ok(match name {
                "block_count" => Some(79.into()),
                "nextn_predict_layers" => Some(1.into()),
                "rope.scaling.type" => Some("yarn".into()),
                "kinds" => Some(vec!["full", "shared"].into()),
                _ => None,
            })
        }
        fn has_tensor(&self, name: &str) -> bool {
            name == "output.weight"
        }
    }

    fn value(text: &str) -> Outcome {
        evaluate(text, &Fixed).expect(text)
    }

    #[test]
    fn arithmetic_and_defaults() {
        assert_eq!(value("block_count - nextn_predict_layers"), Outcome::Is(78.into()));
        assert_eq!(value("block_count - (dense ?? 3) * 2"), Outcome::Is(73.into()));
        assert_eq!(value("7 / 2"), Outcome::Is(number(3.5)));
        assert_eq!(value("0.0707 * 10"), Outcome::Is(number(0.707)));
        assert_eq!(value("if(block_count > 3, 'many', 'few')"), Outcome::Is("many".into()));
        assert_eq!(value("if(dense, 'many', if(1, 2, 3))"), Outcome::Is(2.into()));
        assert_eq!(value("block_count + dense"), Outcome::Absent);
        assert_eq!(value("nonzero(block_count - 79) ?? 5"), Outcome::Is(5.into()));
        assert_eq!(value("nonzero(block_count)"), Outcome::Is(79.into()));
        assert_eq!(value("nonzero(dense)"), Outcome::Absent);
        assert_eq!(value("at(kinds, 1)"), Outcome::Is("shared".into()));
        assert_eq!(value("at(kinds, 2) ?? 'none'"), Outcome::Is("none".into()));
        assert_eq!(value("at(dense, 0)"), Outcome::Absent);
        assert_eq!(value("at(block_count, 0)"), Outcome::Absent);
        assert_eq!(value("dense ?? omit"), Outcome::Omit);
        assert_eq!(value("q_lora_rank ?? null"), Outcome::Is(Value::Null));
    }

    #[test]
    fn conditions() {
        for yes in [
            "rope.scaling.type == 'yarn'",
            "not dense",
            "block_count > 3 and tensor('output.weight')",
            "dense == 1 or block_count >= 79",
            "rope.scaling.type != 'linear'",
        ] {
            assert!(holds(&value(yes)), "{yes}");
        }
        for no in ["dense", "dense != 1", "0", "tensor('x')", "not (block_count)"] {
            assert!(!holds(&value(no)), "{no}");
        }
    }

    #[test]
    fn damaged_expressions_are_refused() {
        for bad in
            ["", "1 +", "(1", "'open", "tensor(x)", "1 2", "'a' * 2", &"(".repeat(100), &"not ".repeat(100)]
        {
            assert!(evaluate(bad, &Fixed).is_err(), "{bad}");
        }
    }
}
