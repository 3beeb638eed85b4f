// The texts of the page in each language, and the functions that show them.

const TEXTS = {
  en: {
    title: "heedful",
    skip: "Skip to the content",
    uses: "What to do",
    switchLanguage: "中文",
    themeAuto: "Theme: auto",
    themeLight: "Theme: light",
    themeDark: "Theme: dark",
    keyLabel: "This server needs an API key",
    keySave: "Use this key",
    tabTranslate: "Translate",
    tabGenerate: "Generate",
    tabChat: "Chat",
    tabClassify: "Classify",
    tabFill: "Fill",
    from: "From",
    to: "To",
    detect: "Detect language",
    anyLanguage: "Any",
    detected: "detected: {language}",
    swap: "Exchange the languages",
    alternatives: "Alternatives",
    sourceText: "Text to translate",
    typeText: "Type or paste a text",
    typePair: "Second text, for a model of pairs",
    translate: "Translate",
    emptyTranslation: "The translation appears here.",
    otherTranslations: "Other translations",
    wordHelp: "Point at a word, or move to it with Tab and the arrow keys, for the words of the text that it is aligned with.",
    wordTouch: "Tap a word for the words of the text that it is aligned with.",
    alignedWith: "Aligned with",
    review: "To review: {reasons}",
    fileTitle: "Translate a file",
    fileDrop: "Choose a file, or drop it here",
    fileFormats: "From and into the languages above: {formats}",
    translateFile: "Translate the file",
    fileOther: "Files of this kind are not translated. Choose one of those above.",
    fileChanged: "The file has changed or is gone. Choose it again.",
    fileProgress: "{done} of {segments} segments",
    fileReviews: "{count} of {segments} segments need a review",
    fileKept: "{count} had a translation, which is kept",
    fileBlank: "{count} without a translation",
    fileDownload: "Download the translation",
    fileReasons: "What to review, by line",
    score: "score {value}",
    model: "Model",
    maxTokens: "New tokens",
    temperature: "Temperature",
    topP: "Top p",
    seed: "Seed",
    random: "random",
    automatic: "automatic",
    prompt: "Prompt",
    typePrompt: "The beginning of a text",
    generate: "Generate",
    emptyGenerated: "The continuation appears here, token by token.",
    tokenHelp: "Point at a token, or move to it with Tab and the arrow keys, for its probability and its alternatives. The darker, the less probable.",
    tokenTouch: "Tap a token for its probability and its alternatives. The darker, the less probable.",
    probability: "Probability",
    mostProbable: "Most probable here",
    system: "System message",
    typeSystem: "You are a helpful assistant.",
    message: "Message",
    conversation: "Conversation",
    typeMessage: "Type a message",
    emptyChat: "Ask something.",
    noAnswer: "The model ended its answer without a word.",
    cut: "Cut off by the limit of new tokens.",
    send: "Send",
    stop: "Stop",
    clear: "New conversation",
    text: "Text",
    secondText: "Second text (for models of pairs)",
    classify: "Classify",
    emptyClasses: "The probability of each class appears here.",
    maskedText: "Text with masks",
    typeMasked: "A <mask> barks.",
    candidates: "Candidates",
    insertMask: "Insert a mask",
    fill: "Fill",
    emptyMasks: "The most probable tokens for each mask appear here.",
    mask: "Mask {number}",
    result: "Result",
    copy: "Copy",
    copied: "Copied",
    ctrlEnter: "Ctrl + Enter",
    enterSends: "Enter sends, Shift + Enter is a new line",
    milliseconds: "{count} ms",
    tokens: "{count} tokens · {rate}/s",
    docs: "Routes of this server",
    docsTitle: "Routes of this server",
    docsKey: "This server needs an API key: give it on the page of the models.",
    docsRequest: "Request",
    docsExample: "Example",
    docsTry: "Send",
    docsField: "Field",
    docsType: "Type",
    docsMeaning: "Meaning",
    docsRequired: "required",
    docsDefault: "default {value}",
    docsPath: "Path",
    docsNotJson: "The request is not JSON: {reason}",
    docsBack: "Page of the models",
    models: "Models: {names} ·",
    noModels: "This server has no model for this page.",
    loading: "The server is loading its models. Waiting…",
    unreachable: "The server does not answer. Is it still running?",
    wrongKey: "The server refused this key.",
    failed: "The server answered {status}.",
    error_invalid_request: "{message}",
    error_invalid_parameter: "{message}",
    error_limit_exceeded: "At most {limit} {name} are allowed here, not {value}.",
    error_context_length_exceeded: "The text has {tokens} tokens, but the model allows {limit}.",
    error_max_tokens_too_large: "The prompt has {tokens} tokens and {new} new ones were asked for, but the model's context is {limit}.",
    error_empty_text: "The text is empty.",
    error_no_mask: "The text has no mask: write {mask} for the word to predict.",
    error_no_translator: "No model translates between these languages. This server has: {pairs}.",
    error_invalid_api_key: "The server refused this key.",
    error_not_allowed: "{message}",
    error_not_found: "The server has no such route.",
    error_model_not_found: "The server no longer has the model {name}, or it is of another kind. Load this page again.",
    error_body_too_slow: "The request took too long to arrive.",
    error_body_too_large: "The text or file is too large: a request may have {limit} bytes.",
    error_rate_limit_exceeded: "The server is busy. Try again in a moment.",
    error_loading: "The server is loading its models. Try again in a moment.",
    error_draining: "The server is shutting down.",
    error_model_failed: "The model {name} does not work at present.",
    error_timeout: "No answer within {seconds} seconds.",
    error_server_error: "The server failed. Its log has the reason.",
    reason_missing: "missing: {pieces}",
    reason_added: "not in the source: {pieces}",
    reason_unknown_removed: "an unknown piece was removed",
    reason_repeated: "{piece} was repeated",
    reason_placed: "{piece} was missing and is placed by its position",
    reason_numbers_joined: "numbers were joined and are separated",
    reason_pieces_joined: "pieces were joined with words and are separated",
    reason_choice: "a choice of texts that is not translated: {piece}",
    reason_forms: "plural forms that the choice of texts lacks: {forms}",
    reason_term: "the term {term} is not always translated by {translations}",
    reason_term_left_out: "the term {term} is not required: the model cannot write {translations}",
    reason_blank: "it has no translation",
    reason_parts_blank: "parts without a translation: {count}",
    reason_unknown: "not read, as the model's vocabulary lacks it: {pieces}",
    reason_words_too_long: "words that are too long for the model: {count}",
    reason_cut: "cut off by the length limit",
    reason_language: "language: the text is in {found}, not in {expected}",
    reason_tags: "the place of tags is uncertain: {text}",
  },
  zh: {
    title: "heedful",
    skip: "跳到正文",
    uses: "功能",
    switchLanguage: "English",
    themeAuto: "主题：自动",
    themeLight: "主题：浅色",
    themeDark: "主题：深色",
    keyLabel: "此服务器需要 API 密钥",
    keySave: "使用此密钥",
    tabTranslate: "翻译",
    tabGenerate: "续写",
    tabChat: "对话",
    tabClassify: "分类",
    tabFill: "填词",
    from: "源语言",
    to: "目标语言",
    detect: "自动检测",
    anyLanguage: "任意",
    detected: "检测到：{language}",
    swap: "交换语言",
    alternatives: "备选译文",
    sourceText: "待译文本",
    typeText: "输入或粘贴文本",
    typePair: "第二段文本（用于文本对模型）",
    translate: "翻译",
    emptyTranslation: "译文显示在这里。",
    otherTranslations: "其他译文",
    wordHelp: "将鼠标指向译文中的词，或用 Tab 键和方向键移到词上，可查看与其对齐的原文词。",
    wordTouch: "点按译文中的词，可查看与其对齐的原文词。",
    alignedWith: "对齐的原文",
    review: "需要审校：{reasons}",
    fileTitle: "翻译文件",
    fileDrop: "选择文件，或拖放到此处",
    fileFormats: "使用上方选择的语言；格式：{formats}",
    translateFile: "翻译文件",
    fileOther: "不支持翻译此类文件，请选择上述格式的文件。",
    fileChanged: "文件已被修改或已不存在，请重新选择。",
    fileProgress: "{done} / {segments} 个句段",
    fileReviews: "{segments} 个句段中有 {count} 个需要审校",
    fileKept: "{count} 个已有译文，予以保留",
    fileBlank: "{count} 个没有译文",
    fileDownload: "下载译文",
    fileReasons: "需要审校的内容（按行）",
    score: "得分 {value}",
    model: "模型",
    maxTokens: "新词元数",
    temperature: "温度",
    topP: "Top p",
    seed: "随机种子",
    random: "随机",
    automatic: "自动",
    prompt: "提示",
    typePrompt: "一段文本的开头",
    generate: "续写",
    emptyGenerated: "续写内容将逐个词元显示在这里。",
    tokenHelp: "将鼠标指向词元，或用 Tab 键和方向键移到词元上，可查看其概率和备选。颜色越深，概率越低。",
    tokenTouch: "点按词元，可查看其概率和备选。颜色越深，概率越低。",
    probability: "概率",
    mostProbable: "此处概率最高的词元",
    system: "系统消息",
    typeSystem: "你是一个乐于助人的助手。",
    message: "消息",
    conversation: "对话",
    typeMessage: "输入消息",
    emptyChat: "请提问。",
    noAnswer: "模型没有回答任何内容。",
    cut: "已达新词元数上限，回答被截断。",
    send: "发送",
    stop: "停止",
    clear: "新对话",
    text: "文本",
    secondText: "第二段文本（用于文本对模型）",
    classify: "分类",
    emptyClasses: "各类别的概率显示在这里。",
    maskedText: "含掩码的文本",
    typeMasked: "A <mask> barks.",
    candidates: "候选数",
    insertMask: "插入掩码",
    fill: "填词",
    emptyMasks: "每个掩码处概率最高的词元显示在这里。",
    mask: "掩码 {number}",
    result: "结果",
    copy: "复制",
    copied: "已复制",
    ctrlEnter: "Ctrl + Enter",
    enterSends: "Enter 发送，Shift + Enter 换行",
    milliseconds: "{count} 毫秒",
    tokens: "{count} 词元 · {rate}/秒",
    docs: "此服务器的接口",
    docsTitle: "此服务器的接口",
    docsKey: "此服务器需要 API 密钥：请在模型页面中输入。",
    docsRequest: "请求",
    docsExample: "示例",
    docsTry: "发送",
    docsField: "字段",
    docsType: "类型",
    docsMeaning: "含义",
    docsRequired: "必填",
    docsDefault: "默认 {value}",
    docsPath: "路径",
    docsNotJson: "请求不是有效的 JSON：{reason}",
    docsBack: "模型页面",
    models: "模型：{names} ·",
    noModels: "此服务器没有适用于本页的模型。",
    loading: "服务器正在加载模型，请稍候……",
    unreachable: "服务器没有响应。它还在运行吗？",
    wrongKey: "服务器拒绝了此密钥。",
    failed: "服务器返回 {status}。",
    error_invalid_request: "请求无效：{message}",
    error_invalid_parameter: "参数 {name} 无效：{message}",
    error_limit_exceeded: "{name} 在此服务器上最多为 {limit}，而不能是 {value}。",
    error_context_length_exceeded: "文本有 {tokens} 个词元，但模型最多允许 {limit} 个。",
    error_max_tokens_too_large: "提示有 {tokens} 个词元，并要求生成 {new} 个新词元，但模型的上下文只有 {limit} 个词元。",
    error_empty_text: "文本为空。",
    error_no_mask: "文本中没有掩码：请在要预测的词处写 {mask}。",
    error_no_translator: "没有模型可在这两种语言之间翻译。此服务器有：{pairs}。",
    error_invalid_api_key: "服务器拒绝了此密钥。",
    error_not_allowed: "不允许此请求：{message}",
    error_not_found: "服务器没有此接口。",
    error_model_not_found: "服务器已没有模型 {name}，或其类型不同。请重新加载本页。",
    error_body_too_slow: "请求传输时间过长。",
    error_body_too_large: "文本或文件过大：一个请求最多 {limit} 字节。",
    error_rate_limit_exceeded: "服务器繁忙，请稍后再试。",
    error_loading: "服务器正在加载模型，请稍后再试。",
    error_draining: "服务器正在关闭。",
    error_model_failed: "模型 {name} 目前无法工作。",
    error_timeout: "{seconds} 秒内没有响应。",
    error_server_error: "服务器出错，原因见其日志。",
    reason_missing: "缺少：{pieces}",
    reason_added: "原文中没有：{pieces}",
    reason_unknown_removed: "已删除一个未知的占位片段",
    reason_repeated: "{piece} 重复出现",
    reason_placed: "译文缺少 {piece}，已按其在原文中的位置补上",
    reason_numbers_joined: "数字连在一起，已分开",
    reason_pieces_joined: "占位片段与词连在一起，已分开",
    reason_choice: "未翻译的可选文本：{piece}",
    reason_forms: "可选文本缺少的复数形式：{forms}",
    reason_term: "术语 {term} 未全部译为 {translations}",
    reason_term_left_out: "不要求术语 {term}：模型无法写出 {translations}",
    reason_blank: "没有译文",
    reason_parts_blank: "没有译文的部分：{count} 个",
    reason_unknown: "模型词表中没有、未读取的部分：{pieces}",
    reason_words_too_long: "对模型来说过长的词：{count} 个",
    reason_cut: "译文达到长度上限，已被截断",
    reason_language: "语言：文本是{found}，而不是{expected}",
    reason_tags: "标签的位置不确定：{text}",
  },
};

let current = localStorage.getItem("language");
if (!(current in TEXTS)) {
  current = navigator.language.toLowerCase().startsWith("zh") ? "zh" : "en";
}

/** The code of the language of the page. */
export function language() {
  return current;
}

/** A text of the page, with `{name}` replaced by values. */
export function text(name, values = {}) {
  return TEXTS[current][name].replace(/\{(\w+)\}/g, (whole, key) => values[key] ?? whole);
}

/** An error of the server in the language of the page, by its code. */
export function errorText({ code, message, status, values }) {
  const name = `error_${code}`;
  if (name in TEXTS[current]) return text(name, { ...values, message });
  return message || text("failed", { status });
}

/** The reasons for a review in the language of the page, by their codes. */
export function reasonsText(reasons, codes) {
  const texts = reasons.map((reason, index) => {
    const { code, values } = codes[index];
    const name = `reason_${code}`;
    if (!(name in TEXTS[current])) return reason;
    if (code !== "language") return text(name, values);
    return text(name, { found: languageName(values.found), expected: languageName(values.expected) });
  });
  return texts.join(current === "zh" ? "；" : "; ");
}

const WITHOUT_SPACES = "zh zho yue ja jpn th tha lo lao km khm my mya bo bod dz dzo".split(" ");

/** True if the words of a language are separated by spaces. */
export function hasSpaces(language) {
  return !WITHOUT_SPACES.includes(language.split(/[-_]/)[0]);
}

/** The name of a language in the language of the page; codes may be those of models (zh_CN, en_XX). */
export function languageName(code, fallback = code) {
  try {
    const names = new Intl.DisplayNames([current], { type: "language", fallback: "none" });
    return names.of(code.replace(/_XX$/, "").replaceAll("_", "-")) ?? fallback;
  } catch {
    return fallback;
  }
}

/** Exchange the language of the page. */
export function switchLanguage() {
  current = current === "en" ? "zh" : "en";
  localStorage.setItem("language", current);
}

const kept = new Map(); // the functions of `keepText` by their elements

/** Show the text that a function returns; again when the language changes. Returns the element. */
export function keepText(element, content) {
  kept.set(element, content);
  element.textContent = content();
  return element;
}

/** Show all texts that the elements of the page name in their data, and those of `keepText`. */
export function showTexts() {
  document.documentElement.lang = current === "zh" ? "zh-Hans" : "en";
  const attributes = [
    ["text", (element, value) => (element.textContent = value)],
    ["hint", (element, value) => (element.placeholder = value)],
    ["empty", (element, value) => (element.dataset.shown = value)],
    ["label", (element, value) => element.setAttribute("aria-label", value)],
    ["title", (element, value) => {
      element.title = value;
      element.setAttribute("aria-label", value);
    }],
  ];
  for (const [name, show] of attributes) {
    for (const element of document.querySelectorAll(`[data-${name}]`)) {
      show(element, text(element.dataset[name]));
    }
  }
  for (const [element, content] of kept) {
    if (element.isConnected) element.textContent = content();
    else kept.delete(element);
  }
  const button = document.getElementById("language");
  button.textContent = text("switchLanguage");
  button.lang = current === "zh" ? "en" : "zh-Hans";
}
