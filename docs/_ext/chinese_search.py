"""Search in the Chinese site: pairs of neighboring characters, without a dictionary of words.

Sphinx 9.0 looks for Chinese words with a package that is not needed here, and its script for the
browser names a stemmer that it does not define, so that no search returns.
"""

import re
from itertools import pairwise

from sphinx.application import Sphinx
from sphinx.search import languages
from sphinx.search.zh import SearchChinese

_RUN = re.compile(r"[\u4e00-\u9fff]+|[^\W\u4e00-\u9fff]+")


class SearchPairs(SearchChinese):
    """The index has every character and every pair; a query is its pairs."""

    language_name = "English"  # of the stemmer, in the script
    js_splitter_code = r"""
var splitQuery = function (query) {
  var terms = [];
  var runs = query.match(/[\u4e00-\u9fff]+|(?:(?![\u4e00-\u9fff])[\p{L}\p{N}_])+/gu) || [];
  runs.forEach(function (run) {
    if (!/[\u4e00-\u9fff]/.test(run)) return terms.push(run);
    var pairs = run.match(/.(?=.)/gu) || [run];
    pairs.forEach(function (first, place) {
      terms.push(run.slice(place, place + 2));
    });
  });
  return terms;
};
"""

    def split(self, input: str) -> list[str]:
        """Words of other scripts, Chinese characters, and their pairs."""
        found = []
        for run in _RUN.findall(input):
            if run[0] < "\u4e00" or run[0] > "\u9fff":
                self.latin_terms.add(run)
                found.append(run)
            else:
                found += [*run, *map("".join, pairwise(run))]
        return found

    def word_filter(self, stemmed_word: str) -> bool:
        """All terms but numbers and English words without content."""
        return not stemmed_word.isdigit() and stemmed_word not in self.stopwords


def setup(app: Sphinx) -> dict[str, bool]:
    """Register it for Chinese."""
    languages["zh"] = SearchPairs
    return {"parallel_read_safe": True, "parallel_write_safe": True}
